"""A login user who is not root: the installed helper gives it a window's rights on a real systemd, and no others."""

from __future__ import annotations

import hashlib

import pytest

from fixtures.testhost.drive import LONG_JOB, Runner, settle
from fixtures.testhost.host import SERVICE, SystemdHost
from fixtures.testhost.needed import need_host
from taugate.errors import ConfigError, HostError
from taugate.host.beside import BesideWindow, Ceiling
from taugate.host.cli import main
from taugate.host.host import Host, HostSettings, connect
from taugate.host.install import installer, rights, sudoers_text
from taugate.host.preflight import Downtime, preflight
from taugate.host.record import WindowSettings
from taugate.host.script import INSTALLED, STATE_DIR, VERSION, file_text

USER, WORK = "eval", "/var/tmp/eval"


class Login(SystemdHost):
    """A host on which the client logs in as an ordinary user."""

    def settings(self, **changes: object) -> HostSettings:
        return super().settings(**({"user": USER, "work_dir": WORK, "sudo": True} | changes))


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    need_host()
    with Login(tmp_path_factory.mktemp("host") / "h") as host:
        host.wait_serving()
        new = f"useradd -m -p '*' -s /bin/sh {USER}; install -d -o {USER} -m 700 /home/{USER}/.ssh"
        key = f"install -o {USER} -m 600 /root/.ssh/authorized_keys /home/{USER}/.ssh"
        done = host.inside("sh", "-ec", f"{new}; {key}")
        assert done.returncode == 0, done.stderr
        yield host


def call(host, capsys, command, *options, user="root"):
    where = ["--host", f"{user}@{host.cable.host_address}", "--service", SERVICE, "--work-dir", WORK]
    files = ["--key", str(host.directory / "client_key"), "--known-hosts", str(host.directory / "known_hosts")]
    code = main(["host", command, *where, *files, *options])
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def installed(host):
    with connect(host.settings(user="root", sudo=False)) as root:
        done = root.transport.run(["sh", "-s"], deadline=30, input=installer([SERVICE], USER, WORK).encode())
        assert done.rc == 0, done.stderr


def as_user(host, *argv):
    return host.inside("runuser", "-u", USER, "--", *argv)


def test_without_the_helper_the_preflight_is_red_and_names_the_command(host, capsys):
    with connect(host.settings(sudo=None)) as reached:
        assert reached.settings.sudo is True, "nobody needs to say that eval is not root"
        checks = preflight(reached, downtime=Downtime(1, 1, 1, "test"), budget_s=60)
    (red,) = [check for check in checks if check.name == "rights"]
    assert not red.ok and "may not be used" in red.detail and "password is required" in red.detail
    assert f"host install --host root@{host.cable.host_address} --service {SERVICE} --for {USER}" in str(red)
    code, _, err = call(host, capsys, "install", user=USER)
    assert code == 2 and "eval is not root on" in err and "connect as root" in err and "--print" in err


def test_root_installs_two_files_that_only_root_can_change(host, capsys):
    code, out, err = call(host, capsys, "install", "--for", USER)
    assert code == 0, err
    text = file_text([SERVICE])
    assert f"{USER} may open windows on {SERVICE}: {INSTALLED} {VERSION}" in out
    assert hashlib.sha256(text.encode()).hexdigest() in out
    stat = host.inside("stat", "-c", "%U:%G %a", INSTALLED, "/etc/sudoers.d/taugate-eval", WORK).stdout.split("\n")
    assert stat[:3] == ["root:root 755", "root:root 440", "eval:root 755"]
    assert host.inside("cat", INSTALLED).stdout == text
    code, out, _ = call(host, capsys, "status", user=USER)
    assert code == 0 and "ready, serves tiny" in out
    plan = call(host, capsys, "plan", user=USER)[1]
    assert f"rights   each of these is given to `sudo -n {INSTALLED} {VERSION} …`" in plan


def refuses_to_kill_what_is_not_the_server_s(host):
    """Even inside its own window, and told the right start time."""
    window = as_user(host, "sudo", "-n", INSTALLED, VERSION, "holder").stdout.split()[2]
    pid = host.show("gpu-monitor.service", "MainPID")["MainPID"]
    start = host.inside("cat", f"/proc/{pid}/stat").stdout.rpartition(") ")[2].split()[19]
    done = as_user(host, "sudo", "-n", INSTALLED, VERSION, "kill-pid", window, SERVICE, pid, start)
    assert done.returncode == 76 and f"pid {pid} is not a process of {SERVICE}" in done.stderr
    assert host.show("gpu-monitor.service", "MainPID")["MainPID"] == pid


@pytest.mark.usefixtures("installed")
def test_a_window_works_and_its_job_is_the_user_s(host, capsys):
    job = ["sh", "-c", f"echo working; id -un >{WORK}/who; echo $HOME $TAUGATE_HELPER >>{WORK}/who"]
    with connect(host.settings()) as reached:
        checks = preflight(reached, downtime=Downtime(1, 1, 1, "test"), budget_s=60)
        assert [str(check) for check in checks if not check.ok] == []
    with Runner(host, "phase:held", job=job) as runner:
        runner.reach("phase:held")
        code, _, err = call(host, capsys, "uninstall")
        assert code == 2 and "in use by `taugate window" in err
        refuses_to_kill_what_is_not_the_server_s(host)
        runner.go()
        end = runner.end()
    assert (end["end"], end["error"]) == ("restored", "NoneType"), end["says"]
    assert host.inside("cat", f"{WORK}/who").stdout == "eval\n/home/eval\n"
    settle(host)


@pytest.mark.usefixtures("installed")
def test_a_job_beside_the_server_is_the_user_s_too(host):
    with connect(host.settings()) as reached:
        window = BesideWindow(reached, WindowSettings((1, 2, 3)), Ceiling(mib=500, spare_mib=100))
        with window:
            job = ["sh", "-c", "id -un; echo $LD_LIBRARY_PATH $TAUGATE_HELPER; exit 3"]
            done = window.run_job(job, deadline_s=20, env={"LD_LIBRARY_PATH": "/x"})
    assert (done.rc, done.stdout) == (3, "eval\n/x\n") and window.record.outcome == "beside"


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_the_host_restores_by_itself_when_the_user_s_client_dies(host):
    with Runner(host, "job", job=LONG_JOB) as runner:
        runner.reach("job")
        runner.kill()
    settle(host)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "argv",
    [
        ["systemctl", "stop", SERVICE],
        ["sh", "-c", "id"],
        [INSTALLED, VERSION, "stop", "w", "ssh.service"],
        [INSTALLED, VERSION, "start", "w", "gpu-monitor.service"],
        [INSTALLED, VERSION, "arm", "w", "60", "ssh.service", "1", "/tmp", "eval@x"],
        [INSTALLED, VERSION, "restore", "ssh.service", "22", "/tmp"],
        [INSTALLED, VERSION, "restore"],
        [INSTALLED, VERSION, "inside", "w", SERVICE],
        [INSTALLED, VERSION, "stop", "w", SERVICE],  # it holds no lease
        [INSTALLED, "stop", "w", SERVICE],
    ],
)
def test_it_gives_no_other_rights(host, argv):
    before = host.show()["InvocationID"]
    done = as_user(host, "env", "TAUGATE_JOB=touch /root/here", "sudo", "-n", *argv)
    assert done.returncode in (1, 64, 75, 79), (done.returncode, done.stdout, done.stderr)
    assert host.show()["InvocationID"] == before and host.inside("ls", "/root/here").returncode != 0
    assert host.show("taugate-window.timer")["LoadState"] == "not-found"


@pytest.mark.usefixtures("installed")
def test_a_note_is_kept_where_only_root_writes(host):
    assert as_user(host, "sudo", "-n", INSTALLED, VERSION, "quarantine", "w", "/etc", "for this test").returncode == 0
    assert host.inside("cat", f"{STATE_DIR}/quarantine").stdout == "window w: for this test\n"
    assert host.inside("ls", "/etc/quarantine").returncode != 0
    assert as_user(host, "sudo", "-n", INSTALLED, VERSION, "release", "/etc").returncode == 0
    assert host.inside("ls", f"{STATE_DIR}/quarantine").returncode != 0


@pytest.mark.usefixtures("installed")
def test_another_version_is_refused_with_the_remedy(host):
    host.inside("sed", "-i", f"s/{VERSION}/0123456789ab/g", INSTALLED)
    with connect(host.settings()) as reached:
        with pytest.raises(HostError, match="another version .*0123456789ab is installed.*host install") as caught:
            reached.helper.call("holder")
        assert "\n" not in str(caught.value)
        assert not rights(reached).ok
    host.inside("sed", "-i", f"s/0123456789ab/{VERSION}/g", INSTALLED)


@pytest.mark.usefixtures("installed")
def test_uninstall_leaves_nothing(host, capsys):
    assert call(host, capsys, "uninstall")[:2] == (0, "the helper is gone\n")
    assert "taugate" not in host.inside("ls", "/etc/sudoers.d", "/usr/local/sbin", "/var/lib").stdout


def test_the_script_for_an_administrator_is_printed_without_a_host(capsys):
    where = ["--host", "eval@nowhere", "--service", SERVICE, "--work-dir", WORK]
    assert main(["host", "install", *where, "--print"]) == 0
    assert capsys.readouterr().out == installer([SERVICE], USER, WORK) + "\n"
    assert main(["host", "install", *where, "--for", "root", "--print"]) == 2
    assert "root needs no helper" in capsys.readouterr().err
    assert sudoers_text(USER).splitlines()[-1] == f"eval ALL=(root) NOPASSWD: {INSTALLED}"
    for user in ("a b", "-x", "x;id", "ALL=x", ""):
        with pytest.raises(ConfigError, match="not the name of a login user"):
            installer([SERVICE], user, WORK)
    with pytest.raises(HostError, match="not a unit name"):
        installer(["x' y.service"], USER, WORK)


def test_a_rootless_login_asks_sudo_for_every_change():
    class Seen:
        name, argvs = "box", []

        def run(self, argv, **_):
            self.argvs.append(list(argv))
            raise HostError("stop here")

    host = Host(HostSettings(SERVICE, host="box", user=USER, sudo=True), Seen())
    with pytest.raises(HostError):
        host.helper.call("holder")
    assert Seen.argvs == [["sudo", "-n", INSTALLED, VERSION, "holder"]]
    assert host.by_hand("systemctl start x") == "ssh eval@box sudo systemctl start x"
