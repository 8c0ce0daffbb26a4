"""What a person reads of several checkpoints: the table, the trend, what lies behind each τ; on the terminal and on the
page.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.shipped import drafter_path
from taugate.drafter.replay import AnchorTable, Verifier
from taugate.gate.tau import Bootstrap, measure
from taugate.pipeline.evaluate import short_names
from taugate.report.drafters import calibration_lines, profile_lines, trend, trend_lines
from taugate.report.html import render_page
from taugate.report.table import render

from .test_statistics import table

pytestmark = pytest.mark.drafter
FEW = Bootstrap(draws=100)


def record(drafter, accepted, verifier="chain", **parts):
    tables = [
        AnchorTable(t.sequence, {verifier: t.accepted["chain"]}, **parts)
        for t in (table(f"{n}", accepted, left=9) for n in range(3))
    ]
    return measure(drafter, "0" * 64, 4, tables, Verifier.parse(verifier), FEW).record()


def test_the_trend_follows_the_training_steps():
    given = (2000, [3, 0, 0, 0]), (500, [0] * 4), (1000, [1, 0] * 2)
    run = [record(f"run/step_{n}", accepted) for n, accepted in given]
    measured = [record("reference", [2, 0, 0, 1]), *run]
    assert [(place, m["tau"]) for place, m in trend(measured)] == [("step 500", 1), ("step 1000", 2), ("step 2000", 4)]
    lines = trend_lines(measured)
    assert lines[0].startswith("step") and "+2.000" in lines[3] and lines[-1] == "  best: run/step_2000"
    assert "\n".join(lines) in "\n".join(render(measured))
    page = render_page(measured, {"chain": 2.5})
    assert "best: run/step_2000" in page and "training step" in page
    assert "training step" not in render_page(measured[:2], {}), "one checkpoint is no trend"


def test_without_steps_the_order_given_counts():
    measured = [record(name, accepted) for name, accepted in (("late", [1, 0]), ("early", [0, 0]))]
    assert [(place, m["drafter"]) for place, m in trend(measured)] == [("order 1", "late"), ("order 2", "early")]


def test_slots_lengths_and_sampling_are_printed():
    overlap = ((0.5, 0.25, 0.125),) * 4
    found = record("ours", [2, 0, 0, 0], overlap=overlap, temperature=0.7)
    lines = profile_lines([found])
    # Three prompts: cycles of 3 tokens and of 1; slot 1 is tried twice and matches once, slots 2 and 3 once each.
    assert lines[1].split()[-3:] == ["0.500", "1.000", "0.000"]
    assert "T = 0.7" in lines[2] and lines[2].split()[-3:] == ["0.500", "0.250", "0.125"]
    assert any(line.split()[-4:] == ["3", "0", "3", "0"] for line in lines)
    assert lines[-1].endswith("rejection sampling would emit 1.641 tokens a cycle")
    assert profile_lines([record("ours", [2, 0, 0, 0], verifier="topk-2")]) == []


def test_calibration_stands_beside_what_came():
    found = record("ours", [2, 0, 0, 1, 0, 0], "ddtree-8", predicted={"ddtree-8": (1.5, 0, 0, 0.5, 0, 0)})
    assert calibration_lines([found])[1].split() == ["ours", "ddtree-8", "1.667", "2.000", "-0.333"]
    assert "expected by the drafter" in render_page([found], {})


def test_checkpoints_of_two_runs_have_different_names():
    assert short_names([Path("a/step_1"), Path("a/step_2")]) == ["step_1", "step_2"]
    assert short_names([Path("a/step_1"), Path("b/step_1")]) == ["a/step_1", "b/step_1"]
    assert short_names([Path("a/step_1")] * 2) == ["step_1"] * 2


def test_the_gate_judges_several_checkpoints(gate_config, shipped):
    """Every rule for every candidate; a drafter is replayed once, and each number and verdict becomes evidence."""
    from fixtures.drafters import Gate, Judges
    from taugate.pipeline.evaluate import read_drafters

    paths = tuple(drafter_path(name) for name in ("early", "candidate"))
    drafters = gate_config.drafters.model_copy(update={"candidate": paths, "reference": drafter_path("reference")})
    config = gate_config.model_copy(update={"drafters": drafters})
    records, said = [], []

    class Evidence:
        add = staticmethod(records.append)

    some = replace(shipped, sequences=shipped.sequences[:6])
    gate = Gate(config, Judges(*read_drafters(config)), some, Evidence, said.append)
    assert gate.fidelity.outcome == "pass" and records[1]["gate"] == "on-policy rate", "asked before any τ"
    verdicts = [gate.judge(0, candidate)[0] for candidate in (0, 1, 1)]
    assert [v.outcome for pair in verdicts for v in pair] == ["inconclusive"] * 6, "six prompts decide nothing"
    chains = [r for r in records if r["type"] == "measurement" and r["verifier"] == "chain"]
    assert [r["drafter"] for r in chains] == ["reference", "early", "candidate"]
    early, candidate = chains[1:]
    assert early["tau"] < candidate["tau"]
    for measured in chains:
        profile = measured["profile"]
        assert len(profile["overlap"]) == 7 and profile["temperature"] == 1.0 and 1 < profile["sampled"] < 8
    trees = [r for r in records if r["type"] == "measurement" and r["verifier"].startswith("ddtree")]
    assert all(1 < r["profile"]["predicted"] < 8 for r in trees)
    text = "\n".join(render(records))
    assert "best: candidate" in text and "calibration" in text and "accepted if all before were" in text
