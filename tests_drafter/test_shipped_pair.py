"""The gate against drafters whose worth is known: the good pass, the bad fail, and too little evidence is neither."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fixtures.shipped import MAX_NEW_TOKENS, PAIR, PROMPTS, drafter_path

pytestmark = pytest.mark.drafter


@pytest.fixture(scope="module")
def config(gate_config):
    """gate.toml as shipped, whatever the session was told to judge."""
    return gate_config


@pytest.fixture(scope="module")
def tables(shipped, config):
    """Anchor tables of the three shipped drafters on 40 of the prompts, by name."""
    import torch

    from taugate.pipeline.evaluate import _judged, replay, verifiers

    torch.set_num_threads(1)
    some = replace(shipped, sequences=shipped.sequences[:40])
    judged = {name: _judged(name, drafter_path(name)) for name in ("reference", "candidate", "early")}
    return {name: (j, replay(j, some, verifiers(config))) for name, j in judged.items()}


@pytest.fixture(scope="module")
def measured(tables, config):
    from taugate.pipeline.evaluate import measurements, verifiers

    return {name: measurements(j, t, verifiers(config), config) for name, (j, t) in tables.items()}


def verdicts(name, measured, config):
    from taugate.config_schema import GateRule
    from taugate.pipeline.evaluate import judge

    rule = GateRule(min_tau=2.5, max_loss_to_reference=0.3)
    return judge(rule, measured[name], measured["reference"], config)


def test_the_reference_is_a_drafter_worth_the_name(measured):
    assert measured["reference"]["chain"].low >= 2.5


def test_the_candidate_passes(measured, config):
    assert [v.outcome for v in verdicts("candidate", measured, config)] == ["pass", "pass"]


def test_the_early_checkpoint_fails_and_the_sentence_names_the_threshold(measured, config):
    threshold, loss = verdicts("early", measured, config)
    assert (threshold.outcome, loss.outcome) == ("fail", "fail")
    assert "min_tau is 2.5" in threshold.sentence and "max_loss_to_reference is 0.3" in loss.sentence
    assert measured["reference"]["chain"].tau - measured["early"]["chain"].tau >= 0.5


def test_few_prompts_decide_nothing_even_for_a_good_drafter(tables, config):
    from taugate.gate.verdict import threshold_verdict
    from taugate.pipeline.evaluate import measurements, verifiers

    judged, all_tables = tables["reference"]
    few = measurements(judged, all_tables[:29], verifiers(config), config)["chain"]
    verdict = threshold_verdict(few, 1.5, min_prompts=30)
    assert few.low > 1.5 and verdict.outcome == "inconclusive"
    assert "min_prompts = 30" in verdict.sentence


def test_verifiers_are_ordered_where_they_must_be(tables, measured):
    """Per anchor topk-8 accepts at least what a tree of 8 or 15 nodes accepts... and never more than the block."""
    for judged, found in tables.values():
        for table in found:
            size = judged.config.block_size
            for chain, tree, best in zip(
                table.accepted["chain"], table.accepted["ddtree-8"], table.accepted["topk-8"], strict=True
            ):
                assert chain <= best < size and tree <= best
    for found in measured.values():
        assert found["chain"].tau < found["topk-8"].tau
        assert found["ddtree-8"].tau <= 9, "a tree of 8 nodes cannot emit more than 9 tokens"


def test_every_token_is_emitted_once(tables):
    """The cycles of a chain cover the completion exactly: every token but the prefill's, each once."""
    from taugate.drafter.replay import walk

    for table in tables["candidate"][1]:
        for verifier in table.accepted:
            cycles = walk(table, verifier)
            assert sum(c.emitted for c in cycles) == table.sequence.last - table.sequence.prompt_length
            assert all(1 <= c.emitted <= 8 for c in cycles)


def test_prompts_are_many_and_their_completions_do_not_loop(shipped_sequences):
    assert len(shipped_sequences) >= 64
    end = 0
    for sequence in shipped_sequences:
        new = sequence.token_ids[sequence.prompt_length :]
        grams = [new[i : i + 8] for i in range(len(new) - 7)]
        assert len(set(grams)) / len(grams) >= 0.6, sequence.prompt_id
        assert len(new) == MAX_NEW_TOKENS or new[-1] == end, sequence.prompt_id
    tags = {tag for line in PROMPTS.read_text().splitlines() for tag in json.loads(line)["tags"]}
    assert len(tags) >= 8


def test_the_pair_is_small_enough_to_ship():
    files = [path for part in ("target", "drafters") for path in (PAIR / part).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 30e6
    assert max(path.stat().st_size for path in files) <= 16e6
