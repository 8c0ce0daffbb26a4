"""The systemd test host must be what it stands for, and must leave nothing on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fixtures.testhost import host as testhost
from fixtures.testhost.host import SERVICE, SystemdHost, serving_pids
from fixtures.testhost.namespaces import impossible
from fixtures.testhost.needed import need_host
from taugate.errors import DeadlineError, HostError
from taugate.host.host import connect
from taugate.polling import poll

_PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    need_host()
    with SystemdHost(tmp_path_factory.mktemp("host") / "h") as host:
        host.wait_serving()
        yield host


def test_it_is_a_real_host_behind_ssh(host):
    with connect(host.settings()) as reached:
        state = reached.unit.show()
        assert (state.active, state.kill_mode, state.timeout_stop_s) == ("active", "mixed", 8)
        assert state.unit_file_state == "enabled" and state.main_pid in reached.unit.pids()
        assert reached.server.identity().model_id == "tiny" and reached.server.ready()
        snapshot = reached.gpus()
        assert [gpu.used_mib for gpu in snapshot.gpus] == [47004, 47004]
        assert {app.pid for app in snapshot.apps} < reached.unit.pids()
        done = reached.transport.run(["ps", "-p", "1", "-o", "comm="], deadline=10)
        assert done.stdout == "systemd\n"
        assert "252" in reached.transport.run(["systemctl", "--version"], deadline=10).stdout


def test_memory_belongs_to_live_processes_and_fuser_sees_who_looks(host):
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    pids = serving_pids(host)
    host.inside("systemctl", "stop", SERVICE)
    assert len(pids) == 2 and host.inside(*query).stdout == "4\n4\n"
    holders = host.inside("fuser", "/dev/nvidia0")
    monitor = host.show("gpu-monitor.service", "MainPID")["MainPID"]
    assert holders.stdout.split() == [monitor]
    host.inside("systemctl", "start", SERVICE)
    host.wait_serving()
    assert host.serves()


def test_a_cut_cable_cuts_the_network_and_nothing_else(host):
    host.cable.cut()
    try:
        with pytest.raises(OSError, match="timed out|No route"):
            socket.create_connection((host.cable.host_address, 22), 0.5).close()
        assert host.serves()
    finally:
        host.cable.mend()
    host.wait_up(10)


def test_the_power_comes_back_with_the_disk_and_without_run(host):
    host.inside("touch", "/var/tmp/stays", "/run/goes")
    before = host.leader()
    host.cut_power()
    host.wait_serving()
    assert host.leader() != before and host.inside("ls", "/var/tmp/stays").returncode == 0
    assert host.inside("ls", "/run/goes").returncode != 0


def test_several_hosts_do_not_see_each_other(host, tmp_path):
    with SystemdHost(tmp_path / "other", faults="model=other") as other:
        other.wait_serving()
        assert other.cable.host_address != host.cable.host_address
        other.inside("systemctl", "stop", SERVICE)
        assert not other.serves("other") and host.serves("tiny")


def test_a_runner_that_is_killed_takes_its_host_along(tmp_path):
    need_host()
    code = """
        import sys, time
        from pathlib import Path
        from fixtures.testhost.host import SystemdHost
        host = SystemdHost(Path(sys.argv[1])).start()
        print(host.leader(), host.cable.name, flush=True)
        time.sleep(100)
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "h")]
    with subprocess.Popen(argv, cwd=_PROJECT, stdout=subprocess.PIPE, text=True) as runner:
        leader, cable = runner.stdout.readline().split()
        runner.kill()
    begun = time.monotonic()
    gone = [Path(f"/proc/{leader}"), Path(f"/sys/class/net/{cable}")]
    poll(lambda: not any(path.exists() for path in gone), deadline=10, what="the host's end", interval=0.05)
    assert time.monotonic() - begun < 5 and str(tmp_path) not in Path("/proc/mounts").read_text()


def test_who_is_not_root_gets_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    impossible.cache_clear()
    try:
        with pytest.raises(HostError, match="^the systemd test host needs root .*use the embedded host$"):
            SystemdHost(tmp_path / "h").start()
        monkeypatch.setenv("CI", "true")
        with pytest.raises(HostError, match="needs root"):
            need_host()
        monkeypatch.setenv("CI", "")
        with pytest.raises(pytest.skip.Exception, match="needs root"):
            need_host()
    finally:
        impossible.cache_clear()


def test_a_host_that_does_not_boot_is_an_error_not_a_wait(tmp_path, monkeypatch):
    need_host()

    def never(*_):
        raise DeadlineError("no boot")

    monkeypatch.setattr(testhost.SystemdHost, "wait_up", never)
    host = SystemdHost(tmp_path / "h")
    with pytest.raises(DeadlineError, match="no boot"):
        host.start()
    assert host._machine is None and host._cgroup is None
