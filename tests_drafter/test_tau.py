"""The gate: do the candidates reach the thresholds of gate.toml on states of the configured target?"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.gpu_window, pytest.mark.drafter]


def test_states_belong_to_completions(gate, record_numbers):
    verdict = gate.fidelity
    record_numbers(gate=verdict.gate, verdict=verdict.outcome)
    if verdict.outcome != "pass":
        pytest.fail(verdict.sentence, pytrace=False)


def test_gate(gate, gate_rule, candidate, record_numbers):
    if gate.fidelity.outcome != "pass":
        pytest.fail(f"no τ is believed, because {gate.fidelity.sentence}", pytrace=False)
    verdicts, measured = gate.judge(gate_rule, candidate)
    record_numbers(
        drafter=measured.drafter,
        drafter_sha256=measured.drafter_sha256,
        verifier=measured.verifier,
        tau=round(measured.tau, 4),
        low=round(measured.low, 4),
        high=round(measured.high, 4),
        prompts=measured.prompts,
        verdict=", ".join(verdict.outcome for verdict in verdicts),
    )
    refused = [f"{v.outcome.upper()}: {v.sentence}" for v in verdicts if v.outcome != "pass"]
    if refused:
        pytest.fail("\n".join(refused), pytrace=False)
