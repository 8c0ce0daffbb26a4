"""Whole models on both paths against float64, level by level, and the known bugs of whole models caught."""

from __future__ import annotations

import pytest

numerics = pytest.mark.numerics
SEED = 2000
"""The faults' own seed: their clean runs are these runs, which are not made twice."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bench(kernels, budgets):
    """Small random models on either path; clean runs are kept for the tests that need the same ones."""
    from taugate.target.discriminate import Bench

    made = {}

    def of(path):
        return made.setdefault(path, Bench(kernels, budgets, path))

    return of


def within(agreements, evidence):
    """Add each to the evidence; the sentences of those beyond their budget."""
    for agreement in agreements:
        evidence.add(agreement.record())
    return [str(agreement) for agreement in agreements if not agreement.ok]


@numerics(level="layer")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("path", ["torch", "fla"])
def test_every_layer_alone(path, dtype, bench, budgets, evidence):
    """Fed the reference's input, without and with left pads; grouped heads are judged with the faults."""
    from taugate.target.agreement import judge_level
    from taugate.target.faults import LEFT_PADS, PLAIN

    found = [
        agreement
        for case in (PLAIN, LEFT_PADS)
        for agreement in judge_level(bench(path).run(case, "layer", dtype, SEED), "layer", budgets, case.name)
    ]
    assert not within(found, evidence)


@numerics(level="propagated")
@pytest.mark.parametrize("path", ["torch", "fla"])
def test_a_free_run_and_its_logits(path, bench, budgets, evidence):
    """In one go, and as prefill in two parts with decoding after it: what is cached is what was computed."""
    from taugate.target.agreement import judge
    from taugate.target.faults import DECODE, PLAIN

    found = [
        agreement
        for case in (PLAIN, DECODE)
        for agreement in judge(
            bench(path).run(case, "propagated", "bf16", SEED), budgets, case.name, ("propagated", "logits")
        )
    ]
    assert not within(found, evidence)


@numerics(level="logits")
def test_logits_in_float32(bench, budgets, evidence):
    from taugate.target.agreement import judge
    from taugate.target.faults import DECODE, LEFT_PADS

    found = [
        agreement
        for case in (LEFT_PADS, DECODE)
        for agreement in judge(
            bench("torch").run(case, "propagated", "fp32", SEED), budgets, case.name, ("propagated", "logits")
        )
    ]
    assert not within(found, evidence)


@numerics(level="propagated")
def test_pads_and_pieces_do_not_change_what_a_model_computes(bench):
    """Right pads too: the reference is that of the unpadded tokens, whichever way the model is called."""
    import torch

    from taugate.target.faults import PLAIN
    from taugate.target.levels import Batch, diverge
    from taugate.target.paths import on_path
    from taugate.target.random_model import SMALL, random_model
    from taugate.target.reference import Reference

    model = random_model(SMALL, SEED)
    ids = PLAIN.batch(SEED).token_ids[0]
    mask = torch.tensor([[1] * 66, [1] * 41 + [0] * 25])
    batches = [
        Batch([ids, [*ids[:41], *[0] * 25]], mask), Batch([ids], pieces=[64, 2]), Batch([ids], pieces=[1, 63, 1, 1]),
    ]  # fmt: skip
    for batch in batches:
        with on_path(model, "torch", None):
            found = diverge(Reference.from_model(model), model, "torch", [batch])
        assert max(*found.propagated, *found.mixer) < 2e-6, batch.pieces


@numerics(level="discrimination")
@pytest.mark.parametrize("path", ["torch", "fla"])
def test_every_fault_of_a_model_is_caught(path, bench, evidence):
    from taugate.target.discriminate import discriminate
    from taugate.target.faults import FAULTS

    found = list(discriminate(bench(path), suites=False))
    missed = [f"{row.fault.name}: {row.clean} / {row.faulty}" for row in found if not row.caught]
    evidence.add(
        {
            "type": "agreement", "level": "discrimination", "what": "injected faults of models caught", "path": path,
            "faults": len(found), "caught": len(found) - len(missed),
        }
    )  # fmt: skip
    assert len(found) == len(FAULTS)
    assert not missed


@numerics(level="discrimination")
def test_no_clean_model_fails(kernels, budgets, evidence):
    """20 seeds on which no budget was set, in the fallback and one case; the slow test has fla and all cases."""
    from taugate.numerics.discriminate import CLEAN_SEEDS
    from taugate.target.discriminate import Bench, false_alarms
    from taugate.target.faults import PLAIN

    alarms = [str(alarm) for alarm in false_alarms(Bench(kernels, budgets, "torch"), CLEAN_SEEDS, [PLAIN])]
    evidence.add(
        {
            "type": "agreement", "level": "discrimination", "what": "false alarms in clean models", "path": "torch",
            "seeds": len(CLEAN_SEEDS), "false_alarms": len(alarms),
        }
    )  # fmt: skip
    assert not alarms


@pytest.mark.slow
@numerics(level="discrimination")
@pytest.mark.parametrize("path", ["torch", "fla"])
def test_no_clean_model_fails_in_20_seeds(path, kernels, budgets):
    from taugate.numerics.discriminate import CLEAN_SEEDS
    from taugate.target.discriminate import Bench, false_alarms

    assert not [str(alarm) for alarm in false_alarms(Bench(kernels, budgets, path), CLEAN_SEEDS)]


def test_the_first_layer_that_exceeds_is_named(budgets):
    """An error in one layer alone is blamed on that layer, not on those that inherit it."""
    import torch

    from taugate.target.agreement import judge_level
    from taugate.target.faults import PLAIN
    from taugate.target.levels import Comparison
    from taugate.target.paths import on_path
    from taugate.target.random_model import SMALL, random_model
    from taugate.target.reference import Reference

    model = random_model(SMALL, SEED)
    reference = Reference.from_model(random_model(SMALL, SEED))
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight *= 1.01
    comparison = Comparison(reference, model, "torch")
    with on_path(model, "torch", None):
        comparison.add_layers(PLAIN.batch(SEED))
        comparison.add(PLAIN.batch(SEED))
    mixer, *_ = judge_level(comparison, "layer", budgets, "one layer off")
    assert not mixer.ok and mixer.index == 1
    assert [error > 1e-5 for error in comparison.errors("mixer")] == [False, True, False]
    assert [error > 1e-5 for error in comparison.errors("propagated")] == [False, True, True]
