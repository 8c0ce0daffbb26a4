"""`python -m taugate host` and the quarantine, on a real systemd: what a person does after a failed restore."""

from __future__ import annotations

import pytest

from fixtures.testhost.drive import Runner, settle
from fixtures.testhost.host import SERVICE, SystemdHost
from fixtures.testhost.needed import need_host
from taugate.errors import WindowError
from taugate.host.cli import main
from taugate.host.host import connect
from taugate.host.lease import Lease
from taugate.host.queue import wait_until_free


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    need_host()
    with SystemdHost(tmp_path_factory.mktemp("host") / "h") as host:
        host.wait_serving()
        yield host


@pytest.fixture
def call(host, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(command, *options):
        where = ["--host", f"root@{host.cable.host_address}", "--service", SERVICE]
        files = ["--key", str(host.directory / "client_key"), "--known-hosts", str(host.directory / "known_hosts")]
        code = main(["host", command, *where, *files, *options])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_the_journal_tells_how_long_the_last_start_took(host):
    with connect(host.settings()) as reached:
        seconds, source = reached.start_estimate()
        assert 0.1 < seconds < 20 and source == "the host's journal of the last start"
        assert reached.start_estimate(7.0) == (7.0, "measured by the last window")


def test_status_and_plan_of_a_host_that_serves_change_nothing(host, call):
    before = host.show()["InvocationID"]
    code, out, _ = call("status")
    assert code == 0 and "sglang.service is active (running), KillMode=mixed, 0 restarts" in out
    assert "ready, serves tiny, 0 requests running" in out and "window     none" in out
    assert "47004/49140 MiB" in out and "quarantine" not in out
    code, out, _ = call("plan")
    assert code == 0 and f"systemctl stop --no-block {SERVICE}   (KillMode=mixed, at most 38 s)" in out
    assert "worst    2858 s without the server; if this machine dies, the host starts it 600 s later" in out
    assert host.show()["InvocationID"] == before and host.show("taugate-window.timer")["LoadState"] == "not-found"


def test_a_window_is_seen_and_not_disturbed_without_force(host, call):
    with Runner(host, "phase:held") as runner:
        runner.reach("phase:held")
        code, out, _ = call("status")
        assert code == 4 and "window     taugate window " in out and "not ready" in out
        with connect(host.settings()) as reached, pytest.raises(WindowError, match="still in use by `taugate window"):
            wait_until_free(reached, 0, print)
        code, _, err = call("restore")
        assert code == 4 and "is in use by `taugate window" in err and not host.serves()
        code, out, _ = call("restore", "--force")
        assert code == 0 and "serves tiny again" in out and host.serves()
        runner.go()
        assert runner.end()["error"] == "LeaseLost"
    settle(host)


def test_after_a_failed_restore_no_window_opens_until_somebody_has_looked(host, call):
    with Runner(host, "phase:held") as runner:
        runner.reach("phase:held")
        host.set_faults("model=other")
        runner.go()
        end = runner.end()
        assert end["end"] == "broken" and runner.process.returncode == 4
    host.inside("systemctl", "stop", "taugate-window.timer")  # it would only find a server that is up
    code, out, _ = call("status")
    assert code == 5 and "quarantine window " in out and "model_id was 'tiny' and is 'other'" in out
    with Runner(host) as runner:
        end = runner.end()
        assert end["error"] == "WindowError" and "takes no windows" in end["says"]
        assert f"python -m taugate host restore --host root@{host.cable.host_address}" in end["says"]
    host.set_faults("")
    host.inside("systemctl", "restart", SERVICE)
    code, out, _ = call("restore")
    assert code == 0 and "windows may be opened" in out
    with Runner(host) as runner:
        assert runner.end()["end"] == "restored"
    said = host.inside("journalctl", "-q", "-t", "taugate").stdout
    assert "opened" in said and "closed" in said and "is 'other'" in said


def test_a_server_that_cannot_be_started_keeps_the_quarantine(host, call):
    with connect(host.settings()) as reached:
        Lease(reached.transport, window_id="w0").quarantine("for this test")
    host.set_faults("exit=1")
    host.inside("systemctl", "stop", SERVICE)
    code, _, err = call("restore")
    assert code == 2 and "restoring sglang.service failed" in err
    assert call("status")[0] == 4 and "for this test" in call("status")[1]
    host.set_faults("")
    assert call("restore")[0] == 0 and call("status")[0] == 0


def test_usage_is_one_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["host", "status"]) == 2
    assert "is the embedded host" in capsys.readouterr().err
    assert main(["host", "status", "--host", "a b", "--service", "x.service"]) == 2
    assert capsys.readouterr().err == "--host a b is not [USER@]HOST[:PORT]\n"
