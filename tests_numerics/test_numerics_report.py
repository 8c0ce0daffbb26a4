"""What people read of the numerics tests: error by layer with budgets, the effect on τ, budgets that were exceeded."""

from __future__ import annotations

import pytest

from taugate.report.html import render_page
from taugate.report.table import render


def divergence(path, error, limit=None, dtype="bf16", tokens=66):
    return {
        "type": "divergence", "target": "tiny", "path": path, "dtype": dtype, "unit": "f", "tokens": tokens,
        "kinds": ["linear_attention", "full_attention"], "mixer": [error, 2.0], "block": [1.5, 1.25],
        "propagated": [error, 2 * error], "final_hidden": 2.5 * error, "kl": 1e-4, "logit_rms": 0.02,
        "token": {"error": 12.0, "index": 3, "layer": 1}, "top": {"same": 0.99, "decided": 60, "flips": 0},
        "limits": {"mixer": limit, "propagated": limit} if limit else {},
    }  # fmt: skip


def agreement(value, limit=9.0, case="66 tokens", what="mixer"):
    return {
        "type": "agreement", "level": "layer", "what": what, "dtype": "bf16", "path": "fla", "value": value,
        "limit": limit, "unit": "f", "case": case, "ok": value <= limit,
    }  # fmt: skip


EFFECT = {
    "type": "effect", "target": "tiny", "dtype": "bf16", "drafter": "candidate", "verifier": "chain", "states": "fla",
    "baseline": "torch", "tau": 2.971, "baseline_tau": 2.975, "difference": -0.004, "low": -0.02, "high": 0.01,
    "prompts": 72,
}  # fmt: skip


def test_paths_stand_beside_each_other_with_their_budgets():
    lines = "\n".join(render([divergence("torch", 3.0, 9.0), divergence("fla", 3.5, 9.0)]))
    assert "torch mixer  fla mixer" in lines
    assert "delta net         3.00       3.50" in lines
    assert "budget" in lines and "9.00" in lines
    assert "final   hidden" in lines and "8.75" in lines
    assert "fla: KL 0.0001 nats, same argmax 99.00%, 0 flips among 60 tokens" in lines


def test_targets_and_precisions_have_their_own_tables():
    lines = render([divergence("torch", 3.0), divergence("torch", 0.0002, dtype="fp32")])
    assert [line.partition(":")[0] for line in lines if line.startswith("tiny")] == ["tiny, bf16", "tiny, fp32"]
    assert any("2.0e-04" in line for line in lines)


def test_of_a_path_that_was_measured_twice_the_longer_run_counts():
    lines = render([divergence("torch", 3.0, tokens=5000), divergence("torch", 4.0, tokens=66)])
    assert "5000 tokens" in lines[0] and any("3.00" in line for line in lines)
    assert not any("4.00" in line for line in lines)


def test_effect_names_its_two_sources_and_its_interval():
    lines = "\n".join(render([EFFECT]))
    assert "fla − torch" in lines and "2.971 − 2.975" in lines and "-0.004 [-0.020, +0.010]" in lines


def test_the_nearest_measure_stands_for_its_budget_and_an_excess_is_shouted():
    lines = render([agreement(3.0), agreement(8.0, case="left padding"), agreement(1.0, what="block")])
    assert len(lines) == 3
    assert "8" in lines[2] and "left padding" in lines[2] and "3" not in lines[2]
    assert any("over: 9.5" in line for line in render([agreement(9.5), agreement(1.0)]))


def test_the_page_shows_plots_tables_and_agreements():
    page = render_page([divergence("torch", 3.0, 9.0), divergence("fla", 3.5, 9.0), EFFECT, agreement(3.0)], {})
    assert page.count("<svg") == 2
    assert "<h2>Numerics</h2>" in page and "effect of the kernel path on τ" in page and "left padding" not in page


@pytest.mark.parametrize("records", [[], [agreement(3.0)]])
def test_a_run_without_divergence_has_no_numerics_on_its_page(records):
    assert "<h2>Numerics</h2>" not in render_page(records, {})
