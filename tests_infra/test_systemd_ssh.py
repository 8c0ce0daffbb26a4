"""The SSH transport against a real OpenSSH server: jump hosts, pinned keys, and as few sessions as it can be set to."""

from __future__ import annotations

import threading

import pytest

from fixtures.testhost.drive import Runner, settle
from fixtures.testhost.host import SystemdHost
from fixtures.testhost.needed import need_host
from taugate.errors import HostError
from taugate.host.host import connect
from taugate.host.ssh import SshTransport


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    need_host()
    with SystemdHost(tmp_path_factory.mktemp("host") / "h") as host:
        host.wait_serving()
        yield host


def sshd(host, *lines):
    """Give its sshd these settings on top of its own."""
    text = "\n".join(lines)
    restart = "systemctl reset-failed ssh; systemctl restart ssh"  # else the fifth one in 10 s is refused
    done = host.inside("sh", "-c", f"printf '%s\n' '{text}' >/etc/ssh/sshd_config.d/a.conf; {restart}")
    assert done.returncode == 0, done.stderr
    host.wait_up(10)


@pytest.fixture
def few_sessions(host):
    yield lambda count: sshd(host, f"MaxSessions {count}")
    sshd(host)


def test_a_window_on_a_host_that_allows_one_session_a_connection(host, few_sessions):
    """Its job holds one session while the lease is renewed over others: there must be more than one connection."""
    few_sessions(1)
    with Runner(host, job=["sh", "-c", "echo working; sleep 6"], ttl_s=3.0) as runner:
        end = runner.end()
    assert (end["end"], end["error"]) == ("restored", "NoneType"), end["says"]
    settle(host)


def test_more_commands_at_once_than_all_connections_have_sessions_wait_for_each_other(host, few_sessions):
    few_sessions(1)
    answers = {}
    with connect(host.settings()) as reached:

        def work(number):
            answers[number] = reached.transport.run(["sh", "-c", f"sleep 0.5; echo {number}"], deadline=20).stdout

        threads = [threading.Thread(target=work, args=(number,)) for number in range(7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(reached.transport._logins) <= 4
    assert answers == {number: f"{number}\n" for number in range(7)}


def test_a_host_that_allows_no_session_at_all_is_one_sentence(host, few_sessions):
    few_sessions(0)
    with pytest.raises(HostError, match=r"^root@.* lets root in and refuses the first session .*MaxSessions"):
        connect(host.settings())


def test_through_a_real_jump_host_with_everything_in_an_included_file(host, tmp_path):
    """The host is its own jump host: to its own loopback, which nobody else reaches."""
    key, address = host.directory / "client_key", host.cable.host_address
    known = tmp_path / "known"
    line = (host.directory / "known_hosts").read_text().split(" ", 1)[1]
    known.write_text(f"{address} {line}inner {line}")
    shared = f"User root\nIdentityFile {key}\nUserKnownHostsFile {known}\n"
    included = tmp_path / "hosts"
    inner = f"Host gpu\nHostName 127.0.0.1\nHostKeyAlias inner\nProxyJump door\n{shared}"
    included.write_text(f"{inner}Host door\nHostName {address}\n{shared}")
    config = tmp_path / "config"
    config.write_text(f"Include {included}\n")
    transport = SshTransport("gpu", config=config)
    said = transport.run(["sh", "-c", "echo $SSH_CONNECTION"], deadline=10).stdout.split()
    transport.close()
    assert said[0] == "127.0.0.1" and said[2:] == ["127.0.0.1", "22"]


def test_a_pinned_key_of_a_real_host(host, tmp_path):
    shown = host.inside("ssh-keygen", "-lf", "/etc/ssh/ssh_host_ed25519_key.pub").stdout.split()[1]
    pins = {"known_hosts": tmp_path / "none"}
    with connect(host.settings(host_key_fingerprint=(shown,), **pins)) as reached:
        assert reached.transport.run(["true"], deadline=10).rc == 0
    other = "SHA256:" + "A" * 43
    with pytest.raises(HostError) as caught:
        connect(host.settings(host_key_fingerprint=(other,), **pins))
    assert f"is ssh-ed25519 {shown}, and `host_key_fingerprint` is {other}" in str(caught.value)
