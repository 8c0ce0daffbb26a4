"""The two transports keep one contract. SSH is tested against a real server on loopback."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.server
import json
import os
import shlex
import socket
import threading
import time
from pathlib import Path

import pytest

from taugate.errors import DeadlineError, HostError, HostKeyError
from taugate.host.local import LocalTransport
from taugate.host.sglang import SGLangClient
from taugate.host.ssh import SshTransport
from tests_infra.sshserver import SshServer

BIG = 3_000_000  # more than paramiko's window of 2 MiB


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with SshServer(tmp_path_factory.mktemp("sshd")) as running:
        yield running


def ssh_to(server, **changes):
    arguments = {
        "user": server.user,
        "key": server.key,
        "known_hosts": server.known_hosts,
        "connect_timeout": 10,
    }
    return SshTransport("127.0.0.1", **({"port": server.port} | arguments | changes))


@pytest.fixture(params=["ssh", "local"])
def transport(request, server):
    made = ssh_to(server) if request.param == "ssh" else LocalTransport()
    yield made
    made.close()


@pytest.fixture
def ssh(server):
    made = ssh_to(server)
    yield made
    made.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_output_exit_status_and_lines(transport):
    lines = []
    script = "echo one; echo two; printf three; echo bad >&2; exit 5"
    done = transport.run(["sh", "-c", script], deadline=10, on_line=lines.append)
    assert (done.rc, done.stdout, done.stderr) == (5, "one\ntwo\nthree", "bad\n")
    assert lines == ["one", "two", "three"]
    with pytest.raises(HostError, match=r"^listing failed on .*`sh` ended with exit status 5: bad$"):
        done.check("listing")


def test_three_megabytes_on_both_streams(transport):
    script = f"head -c {BIG} /dev/zero; head -c {BIG} /dev/zero >&2; head -c {BIG} /dev/zero"
    done = transport.run(["sh", "-c", script], deadline=60)
    assert (done.rc, len(done.stdout), len(done.stderr)) == (0, 2 * BIG, BIG)


def test_input_larger_than_any_buffer_comes_back(transport):
    data = os.urandom(BIG // 2).hex().encode()
    assert transport.run(["cat"], deadline=60, input=data).stdout.encode() == data
    assert transport.run(["true"], deadline=10, input=data).rc == 0  # a command that does not read its input


@pytest.mark.parametrize("script", ["sleep 30", "while true; do echo tick; sleep 0.1; done"])
def test_deadline_is_total_for_silent_and_chatty_commands(transport, script):
    start = time.monotonic()
    with pytest.raises(DeadlineError, match="within 0.6 s; .*may still be running"):
        transport.run(["sh", "-c", script], deadline=0.6)
    assert time.monotonic() - start < 5
    assert transport.run(["echo", "still here"], deadline=10).stdout == "still here\n"


def test_killed_by_a_signal_is_unknown_not_a_status(transport):
    # Over SSH the user's shell lies in between; it must die itself, else it reports 137 as an exit status.
    victim = "$PPID" if isinstance(transport, SshTransport) else "$$"
    done = transport.run(["sh", "-c", f"kill -9 {victim}"], deadline=10)
    assert done.rc is None
    with pytest.raises(HostError, match="without an exit status"):
        done.check("a job")


def test_arguments_are_not_shell(transport, tmp_path):
    evil = f"x; touch {tmp_path}/pwned #"
    assert (
        transport.run(["printf", "%s|", evil, "$HOME", "a b", ""], deadline=10).stdout
        == f"{evil}|$HOME|a b||"
    )
    assert not (tmp_path / "pwned").exists()
    assert transport.run(["no-such-program"], deadline=10).rc == 127


def test_several_threads_share_a_transport(transport):
    answers = {}

    def work(number):
        answers[number] = transport.run(["sh", "-c", f"sleep 0.2; echo {number}"], deadline=20).stdout

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"{number}\n" for number in range(6)}


def test_ctrl_c_in_a_command_leaves_the_transport_usable(transport):
    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transport.run(["sh", "-c", "echo go; sleep 20"], deadline=30, on_line=interrupt)
    assert transport.run(["true"], deadline=10).rc == 0


def test_put_and_get_are_verified(transport, tmp_path):
    source, remote, back = tmp_path / "a", tmp_path / "host dir" / "b's copy", tmp_path / "back" / "c"
    source.write_bytes(os.urandom(BIG))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert transport.put(source, str(remote)) == digest
    assert transport.get(str(remote), back) == digest
    assert back.read_bytes() == source.read_bytes()
    assert [path.name for path in remote.parent.iterdir()] == [remote.name]
    assert [path.name for path in back.parent.iterdir()] == [back.name]
    with pytest.raises(HostError, match="missing"):
        transport.get(str(tmp_path / "missing"), back)
    assert back.read_bytes() == source.read_bytes()


def test_a_fetch_that_broke_off_goes_on_where_it_was(server, ssh, tmp_path):
    """The second attempt brings over only the rest; a partial file with wrong bytes is found out and given up."""
    source, back = tmp_path / "a", tmp_path / "back"
    source.write_bytes(os.urandom(BIG))

    def cut(count):
        if count > BIG // 2:
            server.drop_connections()

    with pytest.raises(HostError, match="could not be fetched"):
        ssh.get(str(source), back, resume=True, on_bytes=cut)
    part = tmp_path / ".back.part"
    there = part.stat().st_size
    assert BIG // 2 < there < BIG and not back.exists()
    seen = []
    ssh.get(str(source), back, resume=True, on_bytes=seen.append)
    assert back.read_bytes() == source.read_bytes() and not part.exists()
    assert next(count for count in seen if count > there) - there <= 1 << 16, "what was here was not fetched again"

    part.write_bytes(b"other bytes")
    with pytest.raises(HostError, match="does not have the bytes"):
        ssh.get(str(source), tmp_path / "back", resume=True)
    ssh.get(str(source), back, resume=True)
    assert back.read_bytes() == source.read_bytes() and sorted(p.name for p in tmp_path.iterdir()) == ["a", "back"]


def test_a_copy_with_wrong_bytes_is_refused(ssh, tmp_path, monkeypatch):
    source, remote = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"data")
    monkeypatch.setattr(ssh, "_remote_sha256", lambda path: "0" * 64)
    with pytest.raises(HostError, match="does not have the bytes"):
        ssh.put(source, str(remote))
    with pytest.raises(HostError, match="does not have the bytes"):
        ssh.get(str(source), tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_lost_connection_is_unknown_and_the_next_command_connects_again(server, ssh):
    ssh.run(["true"], deadline=10)
    timer = threading.Timer(0.5, server.drop_connections)
    timer.start()
    done = ssh.run(["sleep", "20"], deadline=30)
    timer.join()
    assert done.rc is None and done.seconds < 10
    assert ssh.run(["echo", "back"], deadline=10).stdout == "back\n"


def test_a_dead_link_is_noticed_by_the_kernel(ssh):
    ssh.run(["true"], deadline=10)
    sock = ssh._logins[0].transport.sock
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000


def test_unknown_host_key_gives_the_command_that_adds_it(server, tmp_path):
    known = tmp_path / "known hosts"
    command = f"ssh-keyscan -p {server.port} 127.0.0.1 >> {shlex.quote(str(known))}"
    for text in (None, "", "other.example ssh-ed25519 " + server.host_key_line.split()[1] + "\n"):
        if text is not None:
            known.write_text(text)
        with pytest.raises(HostKeyError) as caught:
            ssh_to(server, known_hosts=known).run(["true"], deadline=10)
        message = str(caught.value)
        assert command in message and "after checking its fingerprint" in message and "SHA256:" in message
        assert "\n" not in message


def test_changed_host_key_is_refused(server, tmp_path):
    known = tmp_path / "known_hosts"
    other = "AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
    known.write_text(f"[127.0.0.1]:{server.port} ssh-ed25519 {other}\n")
    with pytest.raises(HostKeyError, match="is not the one in") as caught:
        ssh_to(server, known_hosts=known).run(["true"], deadline=10)
    message = str(caught.value)
    assert f"ssh-keyscan -p {server.port} 127.0.0.1 >> {known}" in message
    assert f"ssh-keygen -R '[127.0.0.1]:{server.port}'" in message


def test_hashed_known_hosts_are_understood(server, tmp_path):
    salt = os.urandom(20)
    digest = hmac.digest(salt, f"[127.0.0.1]:{server.port}".encode(), "sha1")
    name = "|1|" + "|".join(base64.b64encode(part).decode() for part in (salt, digest))
    (tmp_path / "known").write_text(f"{name} {server.host_key_line}\n")
    transport = ssh_to(server, known_hosts=tmp_path / "known")
    assert transport.run(["true"], deadline=10).rc == 0
    transport.close()


def test_every_way_not_to_get_in_is_one_sentence(server, tmp_path):
    port = free_port()
    other_key = tmp_path / "other"
    import asyncssh

    other_key.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    silent = socket.create_server(("127.0.0.1", 0))
    cases = [
        ({"port": port}, f"connecting to 127.0.0.1 port {port} as user {server.user} was refused"),
        (
            {"key": other_key},
            f"127.0.0.1 port {server.port} as user {server.user} refused the key {other_key}",
        ),
        ({"key": tmp_path / "none"}, "none .*does not exist"),
        ({"port": silent.getsockname()[1], "connect_timeout": 0.5}, "no SSH session with 127.0.0.1 port"),
    ]
    with silent:
        for changes, message in cases:
            with pytest.raises(HostError, match=message) as caught:
                ssh_to(server, **changes).run(["true"], deadline=10)
            assert "\n" not in str(caught.value)


@pytest.fixture
def web():
    """A small web server that answers with and without Content-Length."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"path": self.path, "pad": "x" * 500_000}).encode()
            self.send_response(503 if self.path == "/health" else 200)
            if self.path != "/unsized":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            if self.path == "/slow":
                time.sleep(1.5)
            size = int(self.headers["Content-Length"])
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(self.rfile.read(size))

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield running.server_address[1]
        running.shutdown()
        thread.join()


def test_http_through_the_transport(transport, web):
    client = SGLangClient(transport, web)
    for path in ("/sized", "/unsized"):
        reply = client.get_json(path)
        assert reply.ok and reply.body["path"] == path and len(reply.body["pad"]) == 500_000
    assert client.post_json("/echo", {"ids": list(range(1000))}).body == {"ids": list(range(1000))}
    assert not client.healthy() and client.get_json("/health").status == 503
    with pytest.raises(HostError, match="did not answer /slow within 0.3 s"):
        client.post_json("/slow", {}, deadline=0.3)
    assert SGLangClient(transport, free_port()).get_json("/health").status == 0


def test_local_command_leaves_no_process_after_its_deadline(tmp_path):
    mark = tmp_path / "pid"
    with pytest.raises(DeadlineError):
        LocalTransport().run(
            ["sh", "-c", f"echo $$ > {shlex.quote(str(mark))}; sleep 60 & wait"], deadline=0.5
        )
    assert not Path(f"/proc/{mark.read_text().strip()}").exists()


def test_a_connection_that_cannot_be_written_to_is_replaced(ssh, monkeypatch):
    """The socket is gone and the thread that reads it does not know yet: nothing was asked, so it is asked anew."""
    from taugate.host.sshlogin import Login

    first, session = ssh._any_login(), Login.session

    def broken(self, timeout):
        if self is first:
            raise EOFError
        return session(self, timeout)

    monkeypatch.setattr(Login, "session", broken)
    assert ssh.run(["true"], deadline=10).rc == 0
    assert not first.active
