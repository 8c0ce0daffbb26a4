"""The helper's script, run by a real shell over a systemctl that writes down what it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from taugate.errors import HostError, LeaseLost, WindowError
from taugate.host.job import run_job
from taugate.host.lease import Lease
from taugate.host.local import LocalTransport

SYSTEMCTL = """#!/bin/sh
case "$*" in
"show -p SubState,Description taugate-window.timer") cat $D/timer ;;
"show -p ActiveState --value taugate-window.service") echo inactive ;;
"show -p ActiveState --value "*) cat $D/active ;;
*) echo "systemctl $*" >>$D/log; [ ! -e $D/rc ] || exit $(cat $D/rc) ;;
esac
"""
SYSTEMD_RUN = """#!/bin/sh
for word; do case $word in --setenv=TAUGATE_HELPER=*) ;; *) echo "$word" >>$D/run ;; esac; done
[ ! -e $D/run-rc ] || exit $(cat $D/run-rc)
"""


class Stage(LocalTransport):
    """This machine, with another systemd in front."""

    def __init__(self, directory):
        super().__init__("box")
        self.directory = directory
        self.lease_of("w1", "me@here")
        self.write("active", "inactive")
        for name, text in (
            ("systemctl", SYSTEMCTL),
            ("systemd-run", SYSTEMD_RUN),
            ("systemd-cat", "#!/bin/sh"),
        ):
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)

    def run(self, argv, **options):
        path = f"PATH={self.directory}:{os.environ['PATH']}"
        return super().run(["env", path, f"D={self.directory}", *argv], **options)

    def write(self, name, text):
        (self.directory / name).write_text(f"{text}\n")

    def lease_of(self, window, owner, sub="waiting"):
        self.write("timer", f"Description=taugate window {window} {owner}\nSubState={sub}")

    def nobody(self):
        self.write("timer", "Description=taugate-window.timer\nSubState=dead")

    def done(self):
        file = self.directory / "log"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.removeprefix("systemctl ") for line in lines]

    def ran(self):
        file = self.directory / "run"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


@pytest.fixture
def lease(stage, tmp_path):
    return Lease(stage, window_id="w1", owner="me@here", state_dir=str(tmp_path / "state"))


def job(stage, argv=("true",), window="w1", **env):
    return run_job(stage, argv, window_id=window, number=2, service="a.service", work_dir="/w", deadline_s=60, env=env)


def test_arming_loads_the_timer_and_ends_what_an_earlier_window_left(stage, lease, tmp_path):
    lease.arm(600, "a.service", 30000)
    assert stage.ran() == [
        "--quiet", "--collect", "--unit=taugate-window", "--on-active=600s",
        "--timer-property=AccuracySec=100ms", "--timer-property=StartLimitIntervalSec=0",
        "--property=Type=oneshot", "--property=Restart=on-failure",
        "--property=RestartSec=5s", "--description=taugate window w1 me@here",
        "--setenv=TAUGATE_SERVICE=a.service", "--setenv=TAUGATE_PORT=30000",
        f"--setenv=TAUGATE_STATE={tmp_path}/state", "/bin/sh", "-c",
        "printenv TAUGATE_HELPER | exec /bin/sh -s restore",
    ]  # fmt: skip
    assert stage.done() == ["stop taugate-job-*.service"]


def test_a_second_window_is_told_who_holds_the_host(stage, lease):
    stage.write("run-rc", "1")
    lease.arm(600, "a.service", 1)  # our own earlier command got through although its answer was lost
    stage.lease_of("w2", "bob@lab")
    with pytest.raises(WindowError, match="box is in use by `taugate window w2 bob@lab`"):
        lease.arm(600, "a.service", 1)
    stage.nobody()
    with pytest.raises(HostError, match="arming the dead-man timer taugate-window.timer failed on box"):
        lease.arm(600, "a.service", 1)


@pytest.mark.parametrize("holder", ["another", "nobody", "restoring"])
def test_without_the_lease_nothing_is_changed(stage, lease, holder):
    act = {"another": lambda: stage.lease_of("w2", "bob@lab"), "nobody": stage.nobody,
           "restoring": lambda: stage.lease_of("w1", "me@here", sub="running")}  # fmt: skip
    act[holder]()
    assert not lease.alive()
    deeds = [lease.renew, lease.disarm, lambda: lease.stop("a.service")]
    deeds += [lambda: lease.kill_leftovers("a.service"), lambda: lease.kill("a.service", os.getpid(), 1)]
    for deed in deeds:
        with pytest.raises(LeaseLost, match="window w1 has lost its lease"):
            deed()
    assert job(stage).rc == 75
    assert stage.done() == [] and stage.ran() == []


def test_with_the_lease_each_deed_is_one_command(stage, lease):
    stage.write("active", "active")
    assert lease.alive() and lease.is_mine(lease.holder())
    lease.renew()
    lease.stop("a.service")
    assert lease.disarm("a.service")
    lease.start("a.service")
    assert stage.done() == ["restart taugate-window.timer", "stop --no-block a.service",
                            "stop taugate-window.timer", "reset-failed a.service",
                            "start --no-block a.service"]  # fmt: skip


def test_a_renewal_under_way_is_not_taken_for_a_lost_lease(stage, lease):
    stage.nobody()
    shown = "Description=taugate window w1 me@here\\nSubState=waiting\\n"
    later = f"sleep 0.15; printf '{shown}' >{stage.directory}/timer"
    with subprocess.Popen(["sh", "-c", later]):
        assert lease.alive()


def test_a_timer_that_went_in_between_is_a_lost_lease(stage, lease):
    stage.write("rc", "5")
    for deed in (lease.renew, lease.disarm):
        with pytest.raises(LeaseLost):
            deed()


def test_nothing_is_killed_or_run_beside_a_server_and_the_lease_is_kept_without_one(stage, lease):
    stage.write("active", "activating")
    assert lease.kill_leftovers("a.service").rc == 76 and lease.kill("a.service", 1, 1).rc == 76
    assert job(stage).rc == 76 and "somebody started it" in job(stage).stderr
    assert lease.disarm("a.service") is False
    assert stage.done() == [] and stage.ran() == []


def test_a_pid_that_has_become_another_process_is_not_killed(stage, lease):
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        with open(f"/proc/{sleeper.pid}/stat") as stream:
            start = int(stream.read().rsplit(") ", 1)[1].split()[19])
        assert lease.kill("a.service", sleeper.pid, start + 1).rc == 76 and sleeper.poll() is None
        assert lease.kill("a.service", sleeper.pid, start).rc == 0
        assert sleeper.wait(10) == -9


def test_nobody_starts_a_server_in_another_s_window(stage, lease):
    stage.lease_of("w2", "bob@lab")
    with pytest.raises(WindowError, match="in use by taugate window w2 bob@lab"):
        lease.start("a.service")
    stage.nobody()
    lease.start("a.service")
    assert stage.done() == ["reset-failed a.service", "start --no-block a.service"]


def test_the_job_command(stage):
    job(stage, ["py", "-c", "x $y"], A="b c")
    assert stage.ran() == [
        "--quiet", "--collect", "--wait", "--pipe", "--unit=taugate-job-w1-2",
        "--property=RuntimeMaxSec=60", "--property=WorkingDirectory=/w",
        "--setenv=TAUGATE_JOB=env 'A=b c' py -c 'x $y'", "--setenv=TAUGATE_UID=", "--setenv=TAUGATE_GID=",
        "--property=Conflicts=a.service", "--property=After=a.service", "--property=TimeoutStopSec=10",
        "/bin/sh", "-c", 'eval "$TAUGATE_HELPER"', "taugate-host", "inside", "w1", "a.service",
    ]  # fmt: skip


def test_a_quarantined_host_takes_no_windows(stage, lease, tmp_path):
    lease.quarantine("another server\nanswers: 'x'")
    with pytest.raises(WindowError, match="box takes no windows.*another server answers: 'x'.*host restore"):
        lease.arm(600, "a.service", 1)
    assert stage.ran() == []
    shutil.rmtree(tmp_path / "state")
    lease.arm(600, "a.service", 1)
    assert stage.ran()
