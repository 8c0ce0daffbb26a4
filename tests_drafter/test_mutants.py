"""Classic mistakes of evaluators, each put in on purpose: the test that is named beside it must notice."""

from __future__ import annotations

import dataclasses

import pytest

from taugate.drafter import cached, model
from taugate.gate import tau

from . import test_parity, test_statistics

pytestmark = test_parity.pytestmark


def over_count_at_the_end(patch):
    patch.setattr(cached.AnchorTable, "emitted", lambda self, verifier, anchor: self.depth(verifier, anchor) + 1)


def mean_of_means(patch):
    original = tau.measure

    def measure(*args):
        found = original(*args)
        return dataclasses.replace(found, tau=found.tau_macro)

    patch.setattr(test_statistics, "measure", measure)


def drop_the_bonus_token(patch):
    original = tau.walk
    patch.setattr(
        tau, "walk", lambda table, name: [dataclasses.replace(c, emitted=c.emitted - 1) for c in original(table, name)]
    )


def forget_the_clusters(patch):
    original = tau.interval

    def by_cycle(tokens, cycles, block_size, how):
        alone = [t / c for t, c in zip(tokens, cycles, strict=True) for _ in range(c)]
        return original(alone, [1] * len(alone), block_size, how)

    patch.setattr(tau, "interval", by_cycle)


def shift_the_taps(patch):
    before_context(patch, lambda taps: taps.roll(1, dims=1))


def swap_the_taps(patch):
    before_context(patch, lambda taps: taps.roll(taps.shape[-1] // 2, dims=-1))


def before_context(patch, change):
    original = model.Drafter.context
    patch.setattr(model.Drafter, "context", lambda self, taps, **rest: original(self, change(taps), **rest))


def let_the_anchor_see_its_own_state(patch):
    original = model.visible
    patch.setattr(
        model,
        "visible",
        lambda context, first, stop, anchors, *rest: original(context, first, stop, anchors + 1, *rest),
    )


def logits(public):
    test_parity.test_logits(public, "full", 17, True)


MUTANTS = [
    (over_count_at_the_end, lambda public: test_statistics.test_every_token_is_emitted_once()),
    (mean_of_means, lambda public: test_statistics.test_tau_is_pooled_and_counts_the_bonus_token()),
    (drop_the_bonus_token, lambda public: test_statistics.test_tau_is_pooled_and_counts_the_bonus_token()),
    (forget_the_clusters, lambda public: test_statistics.test_the_interval_is_clustered_by_prompt()),
    (shift_the_taps, logits),
    (swap_the_taps, logits),
    (let_the_anchor_see_its_own_state, logits),
]


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_mutant_breaks_its_test(mutant, check, public, monkeypatch):
    check(public)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(public)
