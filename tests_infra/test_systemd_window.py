"""The core of the fault matrix on a real systemd and a real sshd; benchmarks/window_faults.py is all of it.

Each row boots its own host, does one thing to a window on it, and asks: does the same model answer real
requests again, or was an alarm raised; did the host begin in time; does every foreign process live?
"""

from __future__ import annotations

import time

import pytest

from fixtures.testhost.drive import Runner
from fixtures.testhost.host import SERVICE, SystemdHost
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
def test_a_window_costs_at_most_three_seconds_beyond_stop_start_and_job(tmp_path, record_property):
    need_host()
    with SystemdHost(tmp_path / "host") as host:
        host.wait_serving()
        begun = time.monotonic()
        host.inside("systemctl", "stop", SERVICE)
        host.inside("systemctl", "start", SERVICE)
        host.wait_serving()
        own_s = time.monotonic() - begun
        with Runner(host, job=["sleep", "1"]) as runner:
            record = runner.end()["record"]
    at = [(event["phase"], event["seconds"]) for event in record["phases"]]
    phases = {f"{a}-{b}": round(end - start, 2) for (a, start), (b, end) in zip(at, at[1:], strict=False)}
    record_property("phases", phases)
    overhead = record["downtime_s"] - own_s - 1
    assert overhead <= 3, (overhead, phases)
