"""Windows on the embedded host with its faults switched on, over real SSH and real processes."""

from __future__ import annotations

import pytest

from fixtures.embedded.launch import EmbeddedHost
from fixtures.host import _settings
from taugate.errors import HostError
from taugate.host.host import connect
from taugate.host.record import WindowSettings
from taugate.host.window import Window
from tests_infra.gatehost import acquired, configured, stub_host

FAST = {
    "canary_input_ids": (5, 6, 7),
    "escalate_after_s": 1.0,
    "free_timeout_s": 30.0,
    "start_timeout_s": 60.0,
    "poll_s": 0.1,
}


def window_on(embedded, tmp_path, **settings):
    host = connect(_settings(configured(tmp_path / "store").host, embedded.info))
    return host, Window(host, WindowSettings(**{**FAST, **settings}))


@pytest.mark.parametrize("fault", [None, "memory-stays", "slow-start=3"])
def test_the_gpus_are_free_inside_and_the_server_is_back_after(tmp_path, fault):
    with stub_host(tmp_path / "host", faults=[fault] if fault else []) as embedded:
        host, window = window_on(embedded, tmp_path)
        with host, window:
            assert max(embedded.used_mib()) < 100, "nobody holds the GPUs inside a window"
            assert embedded.show()["ActiveState"] != "active"
            done = window.run_job(["sh", "-c", "echo here; exit 3"], deadline_s=20)
            assert (done.rc, done.stdout.strip()) == (3, "here")
        assert window.record.outcome == "restored"
        assert min(embedded.used_mib()) > 40_000 and embedded.request("/ready")[0] == 200
        assert bool(window.record.escalations) == (fault == "memory-stays"), window.record.escalations
        assert window.record.canary["same"]


@pytest.mark.slow
def test_a_capture_beside_the_server_never_stops_it(tmp_path):
    records = []
    with stub_host(tmp_path / "host") as embedded:
        before = embedded.show()
        data = acquired(configured(tmp_path / "store", "capture.beside=true"), embedded.info, record=records.append)
        assert embedded.show() == before and embedded.request("/ready")[0] == 200
        assert embedded.systemctl("is-active", "taugate-window.timer").returncode != 0
    assert all(not data.store.missing(data.key(s), ["final_hidden"]) for s in data.sequences)
    (window,) = [record for record in records if record["type"] == "window"]
    assert window["outcome"] == "beside" and window["downtime_s"] is None
    assert "at most 88 MiB of GPU 0, of 2136 MiB free" in window["phases"][2]["detail"]


def test_a_process_of_somebody_else_is_never_killed(tmp_path):
    """Also when leftovers are killed: the foreign holder lives on, and free means the level without the server."""
    with stub_host(tmp_path / "host", faults=["memory-stays"]) as embedded:
        host, window = window_on(embedded, tmp_path)
        with host, embedded.hold_memory(1500) as foreign:
            with window:
                assert 1500 <= embedded.used_mib()[0] < 2000
            assert window.record.escalations and str(foreign) not in " ".join(window.record.escalations)
            assert embedded.used_mib()[0] > 41_500, "both hold their memory again"
        assert window.record.outcome == "restored"


def test_an_unknown_fault_is_said_at_once(tmp_path):
    with pytest.raises(HostError, match="ended instead of starting: .*'nonsense'; known are memory-stays"):
        EmbeddedHost(tmp_path / "host", engine="stub", faults=["nonsense"]).start()
