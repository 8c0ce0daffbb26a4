"""The core of the fault matrix on a real systemd and a real sshd; benchmarks/window_faults.py is all of it.

Each row boots its own host, does one thing to a window on it, and asks: does the same model answer real
requests again, or was an alarm raised; did the host begin in time; does every foreign process live?
"""

from __future__ import annotations

import pytest

from benchmarks.window_overhead import LIMIT_S, measure, overhead
from fixtures.testhost.host import SystemdHost
from fixtures.testhost.matrix import perform
from fixtures.testhost.needed import need_host
from fixtures.testhost.scenarios_host import scenarios

ROWS = {scenario.name: scenario for scenario in scenarios()}


def rows():
    for name, scenario in ROWS.items():
        yield pytest.param(scenario, id=name, marks=() if scenario.core else pytest.mark.slow)


@pytest.mark.parametrize("scenario", list(rows()))
def test_the_server_comes_back(scenario, tmp_path):
    need_host()
    row = perform(scenario, tmp_path / "host")
    assert row.violation == "", row
    assert row.outcome == scenario.expected and row.foreign_alive


def test_the_whole_matrix_is_forty_rows_and_more():
    assert len(ROWS) >= 40 and len(set(ROWS)) == len(list(scenarios()))


@pytest.mark.slow
def test_a_window_costs_at_most_three_seconds_beyond_stop_start_and_job(tmp_path):
    need_host()
    with SystemdHost(tmp_path / "host") as host:
        host.wait_serving()
        steps = measure(host, windows=2)
    print("; ".join(f"{step.name} {step.beyond_s:.2f} s" for step in steps))  # into the report, as <system-out>
    assert overhead(steps)["overhead_s"] <= LIMIT_S, steps
