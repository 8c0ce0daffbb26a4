"""How an SSH host is reached: OpenSSH's configuration, jump hosts, pinned keys, agents, and links that go dead."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time

import asyncssh
import pytest

from taugate.errors import HostError, HostKeyError
from taugate.host import pulse, sshconfig
from taugate.host.ssh import SshTransport
from taugate.host.sshconfig import resolve
from tests_infra.sshserver import SshServer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with SshServer(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture(scope="module")
def jump(tmp_path_factory):
    with SshServer(tmp_path_factory.mktemp("jump")) as running:
        yield running


@pytest.fixture(autouse=True)
def no_agent(monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


def entry(name, server, *more):
    lines = ["HostName 127.0.0.1", f"Port {server.port}", f"User {server.user}", f'IdentityFile "{server.key}"']
    lines += ["IdentitiesOnly yes", f'UserKnownHostsFile "{server.known_hosts}"', *more]
    return "\n".join([f"Host {name}", *lines]) + "\n"


def written(tmp_path, text, name="config"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def says(transport, text):
    """The transport must fail with one sentence that has `text` in it."""
    with pytest.raises(HostError) as caught:
        transport.run(["true"], deadline=10)
    transport.close()
    message = str(caught.value)
    assert text in message and "\n" not in message, message
    return caught.value


INCLUDED = """\
Host gpu
  HostName 10.0.0.9
  User bob
  Port 2200
"""
MAIN = """\
Include {folder}/conf.d/*.conf
Host gpu
  ProxyJump bastion,alice@[::1]:2022
  IdentityFile {folder}/%h-%r
  IdentityFile {folder}/absent
  HostKeyAlias gpubox
  UserKnownHostsFile {folder}/known
Host bastion
  HostName bastion.example
  User {{jumper}}
Match host 10.0.0.9
  Compression yes
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "conf.d").mkdir()
    written(tmp_path, INCLUDED, "conf.d/gpu.conf")
    (tmp_path / "10.0.0.9-bob").touch()
    return written(tmp_path, MAIN.format(folder=tmp_path).replace("{jumper}", "joe"))


def test_a_host_is_where_the_included_file_says(config, tmp_path):
    route = resolve("gpu", config=config)
    assert (route.address, route.port, route.user, route.key_name) == ("10.0.0.9", 2200, "bob", "gpubox")
    assert route.keys == (tmp_path / "10.0.0.9-bob",) and route.known_hosts[0] == tmp_path / "known"
    assert [(hop.address, hop.port, hop.user) for hop in route.jumps] == [
        ("bastion.example", 22, "joe"), ("::1", 2022, "alice"),
    ]  # fmt: skip


def test_what_the_profile_says_wins_over_the_configuration(config, tmp_path):
    route = resolve("gpu", port=22, user="root", key=tmp_path / "k", known_hosts=tmp_path / "h", config=config)
    assert (route.address, route.port, route.user) == ("10.0.0.9", 22, "root")
    assert (route.keys, route.known_hosts, route.only_keys) == ((tmp_path / "k",), (tmp_path / "h",), True)
    assert [hop.known_hosts for hop in route.jumps] == [(tmp_path / "h",)] * 2


def test_without_openssh_s_client_an_include_is_refused_and_not_passed_over(config, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(HostError, match=r"config uses Include or Match exec, which only OpenSSH's client reads"):
        resolve("gpu", config=config)
    plain = written(tmp_path, MAIN.format(folder=tmp_path).split("\n", 1)[1] + INCLUDED, "plain")
    found = resolve("gpu", config=plain)
    monkeypatch.undo()
    assert found == resolve("gpu", config=plain) and found.address == "10.0.0.9"


@pytest.mark.parametrize(
    ("text", "host", "sentence"),
    [
        ("Nonsense yes\n", "gpu", "the SSH configuration cannot be read: .*line 1: Bad configuration option"),
        ("Host a\n ProxyJump b\nHost b\n ProxyJump a\n", "a", "jumps in a circle"),
        ("", "-oProxyCommand=evil", "is not the name of an SSH host"),
        ("", "a b", "is not the name of an SSH host"),
    ],
)
def test_a_configuration_that_leads_nowhere_is_one_sentence(tmp_path, text, host, sentence):
    with pytest.raises(HostError, match=sentence) as caught:
        resolve(host, config=written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_login_with_nothing_but_an_alias(server, tmp_path):
    (tmp_path / "conf.d").mkdir()
    written(tmp_path, entry("gpu", server), "conf.d/gpu")
    transport = SshTransport("gpu", config=written(tmp_path, f"Include {tmp_path}/conf.d/*\n"))
    assert transport.name == f"{server.user}@gpu:{server.port}"
    assert transport.run(["echo", "in"], deadline=10).stdout == "in\n"
    transport.close()


def through(server, jump, tmp_path):
    return written(tmp_path, entry("gpu", server, "ProxyJump bastion") + entry("bastion", jump))


def test_through_a_jump_host(server, jump, tmp_path):
    transport = SshTransport("gpu", config=through(server, jump, tmp_path))
    before = len(jump._connections)
    data = os.urandom(3_000_000)
    (tmp_path / "a").write_bytes(data)
    transport.put(tmp_path / "a", str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == data
    assert len(jump._connections) == before + 1, "one connection to the jump host carries everything"
    jump.drop_connections()
    deadline = time.monotonic() + 10
    while transport._logins[0].active and time.monotonic() < deadline:
        time.sleep(0.02)
    assert transport.run(["echo", "back"], deadline=10).stdout == "back\n", "a lost jump host is logged into again"
    transport.close()
    assert not transport._logins


def test_an_error_names_the_machine_on_the_way_that_made_it(server, jump, tmp_path):
    (tmp_path / "empty").touch()
    for changes, sentence, kind in [
        ({"UserKnownHostsFile": f"{tmp_path}/empty"}, f"the SSH key of 127.0.0.1 port {jump.port}", HostKeyError),
        ({"User": "nobody", "IdentityFile": f"{server.key}"}, f"127.0.0.1 port {jump.port} as user nobody refused the"
         f" key {server.key}", HostError),
    ]:  # fmt: skip
        text = entry("bastion", jump)
        for name, value in changes.items():
            text = "\n".join(f"{name} {value}" if line.startswith(f"{name} ") else line for line in text.splitlines())
        config = written(tmp_path, entry("gpu", server, "ProxyJump bastion") + text)
        assert isinstance(says(SshTransport("gpu", config=config), sentence), kind)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        text = entry("gpu", server, "ProxyJump bastion").replace(f"Port {server.port}", f"Port {port}")
        config = written(tmp_path, text + entry("bastion", jump))
        says(SshTransport("gpu", config=config), f"the jump host bastion does not connect to 127.0.0.1 port {port}")


RELAY = """\
import os, select, socket, sys
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while True:
    for ready in select.select([0, link], [], [])[0]:
        data = os.read(0, 65536) if ready == 0 else link.recv(65536)
        if not data:
            sys.exit()
        link.sendall(data) if ready == 0 else os.write(1, data)
"""


def test_through_a_proxy_command(server, tmp_path):
    relay = shlex.join([sys.executable, str(written(tmp_path, RELAY, "relay.py"))])
    config = written(tmp_path, entry("gpu", server, f"ProxyCommand {relay} %h %p"))
    transport = SshTransport("gpu", config=config)
    assert transport.run(["echo", "in"], deadline=10).stdout == "in\n"
    transport.close()
    config = written(tmp_path, entry("gpu", server, "ProxyCommand false"))
    says(SshTransport("gpu", config=config), "check that ProxyCommand `false` leads to it")


def pinned(server, *pins, **options):
    options = {"port": server.port, "user": server.user, "key": server.key, "config": "/dev/null"} | options
    return SshTransport("127.0.0.1", fingerprints=pins, **options)


def test_a_pinned_host_key_needs_no_known_hosts(server, tmp_path):
    real = asyncssh.import_public_key(server.host_key_line).get_fingerprint()
    other = asyncssh.generate_private_key("ssh-ed25519").get_fingerprint()
    for pins in ([real], [other, real + "="]):
        transport = pinned(server, *pins, known_hosts=tmp_path / "none")
        assert transport.run(["true"], deadline=10).rc == 0
        transport.close()
    # A known_hosts file that knows the key does not make up for a pin that is another machine's.
    error = says(pinned(server, other, known_hosts=server.known_hosts), f"`host_key_fingerprint` is {other}")
    assert isinstance(error, HostKeyError) and real in str(error)
    says(pinned(server, "MD5:aa:bb"), "'MD5:aa:bb' is not a host key's fingerprint")


def test_a_revoked_host_key_is_refused_although_it_is_known(server, tmp_path):
    known = tmp_path / "known"
    known.write_text(f"{server.known_hosts.read_text()}@revoked * {server.host_key_line}\n")
    says(pinned(server, known_hosts=known), "is revoked in")


def test_a_key_with_a_passphrase_is_used_from_the_agent(server, tmp_path, monkeypatch):
    locked = tmp_path / "locked"
    key = asyncssh.read_private_key(server.key)
    locked.write_bytes(key.export_private_key(passphrase="secret"))
    locked.chmod(0o600)
    (tmp_path / "locked.pub").write_bytes(key.export_public_key())
    where = {"key": locked, "known_hosts": server.known_hosts}
    says(pinned(server, **where), f"the key {locked} for 127.0.0.1 port {server.port} as user {server.user} has a")
    path = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL) as agent:
        try:
            while not path.exists():
                time.sleep(0.01)
            monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
            others = []
            for number in range(8):  # more keys than a server lets anybody try
                others.append(tmp_path / f"other{number}")
                others[-1].write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
                others[-1].chmod(0o600)
            subprocess.run(["ssh-add", "-q", *others, server.key], check=True, capture_output=True)
            elsewhere = written(tmp_path, f"Host *\nIdentityAgent {path}\n")
            for variable, config in ((str(path), "/dev/null"), ("", elsewhere)):
                monkeypatch.setenv("SSH_AUTH_SOCK", variable)
                transport = pinned(server, **where, config=config)
                assert transport.run(["true"], deadline=10).rc == 0
                transport.close()
            tries_all = pinned(server, key=None, known_hosts=server.known_hosts, config=elsewhere)
            says(tries_all, "keys: set `key`, or IdentitiesOnly and IdentityFile in ~/.ssh/config")
        finally:
            agent.terminate()


class Freezer:
    """A TCP relay to a server that stops relaying on demand; both its sockets stay open, and the kernel goes on
    acknowledging: only an unanswered request tells that the other end is gone."""

    def __init__(self, port):
        self._port, self.frozen = port, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._relay, daemon=True).start()

    def _relay(self):
        ours, _ = self._listener.accept()
        with ours, socket.create_connection(("127.0.0.1", self._port)) as theirs:
            while not self.frozen.is_set():
                for ready in select.select([ours, theirs], [], [], 0.05)[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    (theirs if ready is ours else ours).sendall(data)
            self._end.wait(20)

    def __enter__(self):
        self._end = threading.Event()
        return self

    def __exit__(self, *exc):
        self._end.set()
        self._listener.close()


def test_a_server_that_falls_silent_is_noticed_during_a_long_command(server, monkeypatch):
    monkeypatch.setattr(pulse, "INTERVAL_S", 0.1)
    monkeypatch.setattr(pulse, "SILENT_S", 0.6)
    with Freezer(server.port) as link:
        pin = asyncssh.import_public_key(server.host_key_line).get_fingerprint()
        transport = pinned(server, pin, port=link.port)
        quiet = transport.run(["sleep", "1.5"], deadline=20)
        assert quiet.rc == 0, "a command that says nothing is not a server that says nothing"
        begun = time.monotonic()
        done = transport.run(["sh", "-c", "echo go; sleep 60"], deadline=60, on_line=lambda _: link.frozen.set())
        assert done.rc is None and done.stdout == "go\n" and time.monotonic() - begun < 5
        transport.close()


def test_a_login_has_one_deadline_for_all_its_steps(server, tmp_path):
    def greet(listener):
        with listener.accept()[0] as link:
            link.sendall(b"SSH-2.0-silent\r\n")
            while link.recv(65536):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=greet, args=(listener,), daemon=True).start()
        port, begun = listener.getsockname()[1], time.monotonic()
        says(pinned(server, port=port, connect_timeout=0.7), "no SSH session with 127.0.0.1 port")
        assert time.monotonic() - begun < 3


def test_paramiko_still_reads_an_include_as_a_word_it_does_not_know(config):
    """Why OpenSSH's client is asked. When this fails, paramiko has learned it."""
    import paramiko

    assert "hostname" in paramiko.SSHConfig.from_path(config).lookup("gpu")
    assert paramiko.SSHConfig.from_path(config).lookup("gpu")["hostname"] == "gpu"
    assert sshconfig.resolve("gpu", config=config).address == "10.0.0.9"
