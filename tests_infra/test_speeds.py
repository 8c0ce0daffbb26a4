"""The expected length of a capture: assumed at first, then from what earlier ones took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from taugate.pipeline.speeds import Speeds
from taugate.target.store import StateIdentity

IDENTITY = StateIdentity("tiny", "w" * 64, "t" * 64, "bfloat16", "fla", "NVIDIA H200", {}, "c" * 64)


def test_it_is_assumed_until_a_capture_was_measured(tmp_path):
    speeds = Speeds(tmp_path, IDENTITY, "auto")
    assert speeds.estimate(10, 5000).seconds == 25 and "assumed" in speeds.estimate(10, 5000).source
    speeds.remember({"load_s": 40.0, "tokens": 0, "seconds": 0.0})
    assert "assumed" in speeds.estimate(10, 5000).source, "a job that found everything done measured nothing"
    speeds.remember({"load_s": 40.0, "tokens": 10_000, "seconds": 5.0, "files": {}})
    speeds.remember({"load_s": 60.0, "tokens": 10_000, "seconds": 15.0, "files": {}})
    again = Speeds(tmp_path, IDENTITY, "auto").estimate(10, 5000)
    assert again.seconds == pytest.approx(1.25 * (60 + 5000 / 1000))
    assert again.source == "from 2 earlier captures, 1000 tokens/s"


@pytest.mark.parametrize("field", ["weights_sha256", "device", "kernel_path", "dtype"])
def test_another_target_or_gpu_knows_nothing_of_it(tmp_path, field):
    Speeds(tmp_path, IDENTITY, "auto").remember({"load_s": 40.0, "tokens": 10_000, "seconds": 5.0})
    other = Speeds(tmp_path, replace(IDENTITY, **{field: "other" * 4}), "auto")
    assert "assumed" in other.estimate(1, 1).source
    assert "assumed" in Speeds(tmp_path, IDENTITY, "streamed").estimate(1, 1).source


def test_old_runs_are_forgotten_and_a_damaged_file_costs_nothing_else(tmp_path):
    speeds = Speeds(tmp_path, IDENTITY, "auto")
    for load in (500.0, 1, 1, 1, 1, 1):
        speeds.remember({"load_s": load, "tokens": 100, "seconds": 1.0})
    assert speeds.estimate(1, 100).seconds == pytest.approx(1.25 * 2)
    (tmp_path / "speeds.json").write_text("{")
    assert "assumed" in speeds.estimate(1, 100).source
