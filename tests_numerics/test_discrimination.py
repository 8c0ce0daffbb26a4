"""Budgets are worth what they catch: every injected fault fails its check, no clean run does."""

from __future__ import annotations

import pytest

numerics = pytest.mark.numerics


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@numerics(level="discrimination")
@pytest.mark.parametrize("family", ["torch", "fla"])
def test_every_fault_is_caught(family, kernels, budgets, evidence):
    """In the real kernels and in the fallback: clean within every budget, with the fault beyond one."""
    from taugate.numerics.discriminate import applicable, discriminate

    found = list(discriminate(kernels, budgets, family, suites=False))
    missed = [f"{row.fault.name}: {row.clean} / {row.faulty}" for row in found if not row.caught]
    evidence.add(
        {
            "type": "agreement",
            "level": "discrimination",
            "what": "injected faults caught",
            "path": family,
            "faults": len(found),
            "caught": len(found) - len(missed),
        }
    )
    assert len(found) == len(applicable(family))
    assert not missed


@numerics(level="discrimination")
def test_no_clean_run_fails(kernels, budgets, evidence):
    """20 seeds on which no budget was set, in the fallback; fla's turn is the command and the slow test."""
    from taugate.numerics.discriminate import CLEAN_SEEDS, false_alarms

    alarms = [str(alarm) for alarm in false_alarms(kernels, budgets, "torch", CLEAN_SEEDS)]
    evidence.add(
        {
            "type": "agreement",
            "level": "discrimination",
            "what": "false alarms in clean runs",
            "path": "torch",
            "seeds": len(CLEAN_SEEDS),
            "false_alarms": len(alarms),
        }
    )
    assert not alarms


@pytest.mark.slow
@numerics(level="discrimination")
def test_no_clean_run_of_fla_fails(kernels, budgets):
    from taugate.numerics.discriminate import CLEAN_SEEDS, false_alarms

    assert not [str(alarm) for alarm in false_alarms(kernels, budgets, "fla", CLEAN_SEEDS)]


@numerics(level="discrimination")
def test_published_tolerances_let_faults_through(kernels, budgets):
    """What other suites would have said of the same tensors: each misses some that our budgets catch."""
    from taugate.numerics.discriminate import SUITES, discriminate

    found = list(discriminate(kernels, budgets, "torch"))
    missed = {name: sum(name in row.let_through for row in found) for name in SUITES}
    assert all(row.caught for row in found)
    assert min(missed.values()) >= 1, missed
    assert missed["fla"] < missed["fla in CI"]
