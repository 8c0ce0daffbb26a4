"""The window on the configured host: states are there, and the host serves the same model afterwards."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu_window


def test_states_are_there_and_the_window_is_told(dataset, evidence):
    from taugate.target.store import FINAL_HIDDEN

    assert not [s.prompt_id for s in dataset.sequences if dataset.store.missing(dataset.key(s), [FINAL_HIDDEN])]
    assert [record["outcome"] for record in evidence.of("window")] in (["restored"], ["not needed"], ["beside"])


def test_host_serves_the_same_model_afterwards(dataset, host, evidence):
    state = host.unit.show()
    assert state.active == "active", f"{host.unit.name} is {state.active}"
    assert host.server.healthy()
    assert host.server.identity().model_id == evidence.of("provenance")[-1]["model_id"]


def test_nothing_of_the_window_is_left_on_the_host(dataset, host):
    from taugate.host.lease import Lease

    assert Lease(host.transport, window_id="after").holder() is None, "the dead-man timer is still armed"
    listed = host.transport.run(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "taugate-job-*.service"], deadline=30
    )
    assert listed.stdout.strip() == ""
    left = host.transport.run(["find", host.work_dir, "-name", "capture-*"], deadline=30)
    assert left.stdout.strip() == ""
