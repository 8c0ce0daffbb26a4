"""τ and what is said beside it, on tables small enough to be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from taugate.drafter.replay import AnchorTable, CachedSequence, Verifier, anchor_table, walk
from taugate.errors import EvidenceError
from taugate.gate.interval import detectable, interval
from taugate.gate.profile import profile
from taugate.gate.tau import Bootstrap, detectable_difference, measure, paired_interval
from taugate.gate.verdict import reference_verdict, threshold_verdict

from . import tiny

CHAIN, BLOCK = Verifier.parse("chain"), 4
FEW = Bootstrap(draws=400)


def table(name, accepted, left=None, predicted=()):
    """A table with one anchor per entry of `accepted`; `left`: tokens the cap would still have allowed at
    the end.
    """
    prompt = 3
    ids = tuple(range(prompt + len(accepted) + 1))
    sequence = CachedSequence(name, ids, prompt, len(ids) + (left or 0))
    return AnchorTable(sequence, {"chain": tuple(accepted)}, predicted={"chain": tuple(predicted)} if predicted else {})


def tau(tables, block=BLOCK, how=FEW, name="ours"):
    return measure(name, "0" * 64, block, tables, CHAIN, how)


# 3 + 1 + 2 tokens in three cycles, and 1 + 1 + 1 in three: emitted tokens by hand.
EASY, HARD = table("easy", [2, 0, 0, 0, 1, 0], left=9), table("hard", [0, 0, 0], left=9)


def test_every_token_is_emitted_once():
    """The last cycle is cut at the end-of-text token: 3 drafted tokens match, 2 are left."""
    short = table("eos", [1, 0, 3, 2], left=9)
    for each in (EASY, HARD, short):
        emitted = [cycle.emitted for cycle in walk(each, "chain")]
        assert sum(emitted) == len(each.sequence.token_ids) - each.sequence.prompt_length - 1
    assert [c.emitted for c in walk(short, "chain")] == [2, 2]


def test_tau_is_pooled_and_counts_the_bonus_token():
    found = tau([EASY, HARD])
    assert (found.tokens, found.cycles) == (9, 6)
    assert found.tau == 1.5 and found.tau_macro == (2 + 1) / 2
    assert tau([table("long", [3, 0, 0, 0] * 5, left=9), HARD]).tau == (20 + 3) / (5 + 3)
    assert tau([table("long", [3, 0, 0, 0] * 5, left=9), HARD]).tau_macro == (4 + 1) / 2
    assert found.tau_anchors == (3 + 1 + 1 + 1 + 2 + 1 + 1 + 1 + 1) / 9


def test_no_cycle_is_no_tau():
    with pytest.raises(EvidenceError, match="no prompt"):
        tau([table("empty", [])])


def clustered(prompts=40, seed=0):
    """Prompts on which the drafter is either good or bad throughout: all the variance lies between
    prompts.
    """
    good = [3, 0, 0, 0] * 10
    return [table(f"{n}", good if n % 2 else [0] * 40, left=9) for n in range(prompts)]


def test_the_interval_is_clustered_by_prompt():
    found = tau(clustered())
    tokens = np.array([p.tokens for p in found.per_prompt])
    cycles = np.array([p.cycles for p in found.per_prompt])
    error = np.sqrt(40 / 39 * ((tokens - found.tau * cycles) ** 2).sum()) / cycles.sum()
    assert found.high - found.low == pytest.approx(2 * 1.645 * error, rel=0.2)
    assert found.low < found.tau < found.high


def test_the_interval_agrees_with_other_ways_to_a_ratio_of_sums():
    """Resampling by hand, scipy's bias-corrected bootstrap, and Student's t on the linearised ratio."""
    from scipy import stats

    rng = np.random.default_rng(3)
    cycles = rng.integers(10, 60, 80)
    tokens = cycles + rng.binomial(3 * cycles, rng.beta(4, 3, 80))
    low, high = interval(tokens.tolist(), cycles.tolist(), BLOCK, Bootstrap(draws=4000))
    tau, width = tokens.sum() / cycles.sum(), high - low
    pick = rng.integers(0, 80, (4000, 80))
    by_hand = np.quantile(tokens[pick].sum(1) / cycles[pick].sum(1), [0.05, 0.95])
    bca = stats.bootstrap(
        (tokens, cycles), lambda t, c, axis: t.sum(axis) / c.sum(axis), paired=True, vectorized=True,
        confidence_level=0.9, n_resamples=4000, rng=np.random.default_rng(1), method="BCa",
    ).confidence_interval  # fmt: skip
    error = np.sqrt(80 / 79 * ((tokens - tau * cycles) ** 2).sum()) / cycles.sum()
    student = tau + stats.t.ppf([0.05, 0.95], 79) * error
    for other in (by_hand, bca, student):
        assert [low, high] == pytest.approx(list(other), abs=0.06 * width)


def test_the_interval_covers_what_it_promises():
    """90 of 100 samples of 40 prompts give an interval around the τ of all prompts; a per-cycle one would give half."""
    rng, hits = np.random.default_rng(5), 0
    chance = rng.beta(2, 2, 200_000)  # of each prompt's tokens; difficulty differs a lot between prompts
    true = 1 + 3 * chance.mean()
    for _ in range(300):
        cycles = rng.integers(20, 40, 40)
        tokens = cycles + rng.binomial(3 * cycles, rng.choice(chance, 40))
        low, high = interval(tokens.tolist(), cycles.tolist(), BLOCK, FEW)
        hits += low <= true <= high
    assert stats_binom(300, 0.9, hits) > 1e-3


def stats_binom(n, p, k):
    """Chance of so few hits."""
    from scipy.stats import binom

    return binom.cdf(k, n, p)


def test_the_detectable_difference_is_what_that_many_prompts_show():
    """Of experiments with a true difference of that size, about 4 in 5 find it."""
    rng, how = np.random.default_rng(1), Bootstrap()

    def experiment(shift):
        cycles = rng.integers(10, 30, 60)
        return np.rint(cycles * rng.normal(3 + shift, 0.6, 60)).astype(int), cycles

    size = np.mean([detectable(*experiment(0.0), how) for _ in range(50)])
    found = 0
    for _ in range(400):
        tokens, cycles = experiment(size)
        error = detectable(tokens, cycles, how) / (1.645 + 0.842)
        found += tokens.sum() / cycles.sum() - 1.645 * error > 3
    assert 0.7 <= found / 400 <= 0.9


def test_pairing_sees_what_two_separate_intervals_do_not():
    ours = tau(clustered())
    theirs = tau(
        [table(t.sequence.prompt_id, [max(a - 1, 0) for a in t.accepted["chain"]], left=9) for t in clustered()]
    )
    difference, low, high = paired_interval(ours, theirs, FEW)
    assert low <= difference <= high and low > 0, "a drafter that is better wherever it differs is better"
    assert detectable_difference(ours, theirs, FEW) < ours.detectable
    with pytest.raises(EvidenceError, match="different prompts"):
        paired_interval(ours, tau(clustered(38)), FEW)


def test_the_profile_by_hand():
    # Cap right after the text: blocks at the last anchors shrink. Cycles: 3 tokens, 1, 2 (cut to what is
    # left).
    one = table("one", [2, 9, 9, 0, 3, 9])
    found = profile([one], "chain", BLOCK)
    assert [c.emitted for c in walk(one, "chain")] == [3, 1, 2]
    assert found.histogram == (1, 1, 1, 0)
    assert (found.shrunk, found.cut, found.whole, found.full) == (1, 1, 2, 0)
    # Slot 1 is tried thrice and matches twice; slot 2 twice and twice (the text ends there); slot 3 once.
    assert found.tried == (3, 2, 1) and found.matched == (2, 2, 0)
    assert found.conditional == (2 / 3, 1.0, 0.0)
    assert profile([HARD], "chain", BLOCK).conditional == (0.0, None, None)


def test_prediction_beside_what_came_of_it():
    both = table("one", [2, 0, 0, 0, 1, 0], left=9, predicted=[1.5, 0, 0, 0.5, 9, 9])
    found = profile([both], "chain", BLOCK)
    assert found.predicted == pytest.approx(1 + (1.5 + 0.5 + 9) / 3) and found.realised == pytest.approx(
        (3 + 1 + 2) / 3
    )


def test_a_drafter_that_samples_its_own_text_is_calibrated():
    """Texts drawn from the drafter's own marginals: what it expects of a tree is what the tree accepts."""
    rng = np.random.default_rng(0)
    from taugate.drafter.judge import Drafts, judge

    trees = [Verifier.parse(name) for name in ("ddtree-4", "ddtree-16", "ddtree-64")]
    logits = torch.from_numpy(rng.normal(0, 2.5, (4000, 5, 12))).float()
    q = logits.double().softmax(-1).numpy()
    truth = (q.cumsum(-1) > rng.random((4000, 5, 1))).argmax(-1)
    found = judge(Drafts(logits, torch.from_numpy(truth), torch.full((4000,), 5)), trees, predict=True)
    for tree in trees:
        error = found.accepted[tree.name].std() / 4000**0.5
        assert abs(found.accepted[tree.name].mean() - found.predicted[tree.name].mean()) < 4 * error


def test_sampling_acceptance_is_the_overlap_of_both_distributions():
    model = tiny.drafter()
    embedding, head = tiny.tables(model.config)
    generator = torch.Generator().manual_seed(0)
    taps, final = torch.randn(20, 64, generator=generator), torch.randn(20, tiny.HIDDEN, generator=generator)
    sequence = CachedSequence("a", tuple(range(20)), 6, 22)
    found = anchor_table(model, sequence, taps, embedding, head, [CHAIN], final_hidden=final, temperature=0.7)
    for row, anchor in enumerate(sequence.anchors()):
        logits, _ = tiny.draft(model, sequence.token_ids, taps, anchor, sequence.block_size(anchor, 6), embedding, head)
        q = (logits / 0.7).softmax(-1)
        p = (final[anchor : anchor + len(q)] @ head.T / 0.7).softmax(-1)
        wanted = [float(torch.minimum(p[k], q[k]).sum()) for k in range(min(len(q), sequence.last - anchor))]
        assert found.overlap[row] == pytest.approx(wanted, rel=1e-4)
    assert profile([found], "chain", 6).overlap[0] == pytest.approx(np.mean([row[0] for row in found.overlap]))


def test_sampling_acceptance_is_what_the_public_rejection_sampler_does(public):
    """Monte Carlo: blocks drawn from the drafter, kept or not by the public implementation, against the closed form."""
    model = tiny.drafter()
    embedding, head = tiny.tables(model.config)
    generator = torch.Generator().manual_seed(4)
    taps, final = torch.randn(20, 64, generator=generator), torch.randn(20, tiny.HIDDEN, generator=generator)
    sequence = CachedSequence("a", tuple(range(20)), 6, 40)
    found = anchor_table(model, sequence, taps, embedding, head * 0.2, [CHAIN], final_hidden=final, temperature=1.3)
    anchor, draws = 9, 4000
    logits, _ = tiny.draft(model, sequence.token_ids, taps, anchor, 6, embedding, head * 0.2)
    q = (logits / 1.3).softmax(-1)[None]
    p = (final[anchor : anchor + 6] @ (head * 0.2).T / 1.3).softmax(-1)[None]
    torch.manual_seed(0)
    drafted = q[0].multinomial(draws, replacement=True).T
    kept = np.array([public._rejection_sample(row[None], p, q)[0] for row in drafted])
    row = found.overlap[anchor - 6]
    for slot, (tried, matched) in enumerate([((kept >= k).sum(), (kept > k).sum()) for k in range(5)]):
        assert abs(matched / tried - row[slot]) < 4 * (row[slot] * (1 - row[slot]) / tried) ** 0.5
    emitted = 1 + np.cumprod(row).sum()
    assert abs(1 + kept.mean() - emitted) < 4 * kept.std() / draws**0.5
    everywhere = [1 + np.cumprod(r).sum() for r in found.overlap if len(r) == 5]
    assert profile([found], "chain", 6).sampled == pytest.approx(np.mean(everywhere))
    assert 0.2 < row[0] < 0.9, "neither always nor never"


def test_a_perfect_tau_is_not_believed():
    perfect = tau([table(f"{n}", [3, 0, 0, 0] * 3, left=9) for n in range(40)])
    assert perfect.tau == BLOCK
    verdict = threshold_verdict(perfect, 2.0, 30)
    assert verdict.outcome == "fail" and "no drafter does on held-out text" in verdict.sentence
    nearly = [table(f"{n}", [3, 0, 0, 0] * 3, left=9) for n in range(39)] + [HARD]
    assert threshold_verdict(tau(nearly), 2.0, 30).outcome == "pass"
    bound = measure("ours", "0" * 64, BLOCK, [bounded(t) for t in nearly[:39]], Verifier.parse("topk-8"), FEW)
    assert threshold_verdict(bound, 2.0, 30).outcome == "pass", "an upper bound may be perfect"


def bounded(each):
    return AnchorTable(each.sequence, {"topk-8": each.accepted["chain"]})


def test_an_inconclusive_verdict_says_what_could_have_been_seen():
    found = tau(clustered())
    verdict = threshold_verdict(found, found.tau, 30)
    assert (
        verdict.outcome == "inconclusive" and f"{found.detectable:.3f} is the smallest difference" in verdict.sentence
    )
    compared = reference_verdict(found, tau(clustered(), name="theirs"), -0.1, 30, FEW)
    assert compared.outcome == "fail" and "even the high end loses more" in compared.sentence
