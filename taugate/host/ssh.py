"""A host over SSH (paramiko): strict host keys, one channel per command, total deadlines, verified copies."""

from __future__ import annotations

import contextlib
import getpass
import os
import selectors
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import paramiko

from taugate.errors import DeadlineError, HostError
from taugate.host.sshlogin import LOST, open_client, why
from taugate.host.transport import Completed, HashingFile, OnLine, OutputCollector, partial_of

_CHUNK = 1 << 16
_SFTP_IDLE_S = 60.0


class SshTransport:
    """See `Transport`. Connects at the first use, and again at the next use after a connection was lost.

    key None: agent and the user's default keys are tried; otherwise only that key. known_hosts: the only file
    consulted.
    """

    def __init__(
        self,
        host: str,
        port: int = 22,
        user: str | None = None,
        key: Path | None = None,
        known_hosts: Path | None = None,
        connect_timeout: float = 15.0,
    ) -> None:
        self.host = host
        self.port = port
        self.user = user or getpass.getuser()
        self.key = Path(key).expanduser() if key else None
        self.known_hosts = Path(known_hosts or "~/.ssh/known_hosts").expanduser()
        self.connect_timeout = connect_timeout
        self.name = f"{self.user}@{host}" + (f":{port}" if port != 22 else "")
        self._lock = threading.Lock()
        self._client: paramiko.SSHClient | None = None

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline: float,
        input: bytes | None = None,
        on_line: OnLine | None = None,
    ) -> Completed:
        """See `Transport.run`."""
        start = time.monotonic()
        output = OutputCollector(on_line)
        channel = self._session(min(deadline, self.connect_timeout))
        try:
            _execute(channel, shlex.join(argv), deadline)
            self._exchange(channel, input or b"", output, start + deadline)
            status = channel.exit_status
        except TimeoutError:
            raise DeadlineError(
                f"`{shlex.join(argv)}` on {self.name} did not end within {deadline:g} s; it may still be running there"
            ) from None
        except LOST:
            status = -1
        finally:
            # Also on Ctrl-C. The command lives on: without a terminal, sshd does not end it with its channel.
            channel.close()
        stdout, stderr = output.finish()
        # paramiko says -1 both for "killed by a signal" and for "connection lost": neither is an exit status.
        rc = None if status == -1 else status
        return Completed(tuple(argv), rc, stdout, stderr, time.monotonic() - start, self.name)

    def put(self, local: Path, remote: str) -> str:
        """See `Transport.put`; missing parent directories are made."""
        part = f"{remote}.part-{os.urandom(4).hex()}"
        self.run(["mkdir", "-p", os.path.dirname(remote) or "."], deadline=30).check(
            f"making the directory of {remote}"
        )
        try:
            with self._sftp() as sftp, open(local, "rb") as reader:
                source = HashingFile(reader)
                sftp.putfo(source, part)
                digest = source.hexdigest()
                if self._remote_sha256(part) != digest:
                    raise HostError(f"{remote} on {self.name} does not have the bytes of {local}: copy it again")
                sftp.posix_rename(part, remote)
        except BaseException as error:
            self._forget(part)
            if isinstance(error, LOST):
                raise HostError(f"{local} could not be copied to {self.name}:{remote}: {why(error)}") from error
            raise
        return digest

    def get(
        self,
        remote: str,
        local: Path,
        *,
        resume: bool = False,
        on_bytes: Callable[[int], None] | None = None,
    ) -> str:
        """See `Transport.get`."""
        local.parent.mkdir(parents=True, exist_ok=True)
        part = partial_of(local, resume)
        keep = False
        try:
            with self._sftp() as sftp, open(part, "a+b") as stream:
                stream.seek(0)
                target = HashingFile(stream, goes_on=True, on_bytes=on_bytes)
                keep = resume
                _copy_rest(sftp, remote, target)
                stream.flush()
                os.fsync(stream.fileno())
            keep = False  # all of it is here: if it is wrong, nothing of it is of use
            if self._remote_sha256(remote) != target.hexdigest():
                raise HostError(f"{local} does not have the bytes of {self.name}:{remote}: fetch it again")
            os.replace(part, local)
        except LOST as error:
            raise HostError(f"{self.name}:{remote} could not be fetched: {why(error)}") from error
        finally:
            if not keep or part.stat().st_size == 0:
                part.unlink(missing_ok=True)
        return target.hexdigest()

    def open_tcp(self, port: int, timeout: float) -> paramiko.Channel:
        """See `Transport.open_tcp` (direct-tcpip: no port is opened on either machine)."""
        try:
            channel = self._transport().open_channel(
                "direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), timeout=timeout
            )
        except paramiko.ChannelException as error:
            if error.code == 2:  # SSH_OPEN_CONNECT_FAILED
                raise ConnectionRefusedError(f"nothing listens on 127.0.0.1:{port} of {self.name}") from None
            raise HostError(
                f"{self.name} does not forward to its port {port} ({error.text}): allow AllowTcpForwarding"
                " local in its sshd"
            ) from error
        except LOST as error:
            raise HostError(f"the connection to {self.name} was lost: {why(error)}") from error
        channel.settimeout(timeout)
        return channel

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            client, self._client = self._client, None
        if client:
            client.close()

    def _session(self, timeout: float) -> paramiko.Channel:
        try:
            return self._transport().open_session(timeout=timeout)
        except paramiko.ChannelException as error:
            raise HostError(
                f"{self.name} refused one more session ({error.text}): raise MaxSessions in its sshd"
            ) from error
        except LOST as error:
            raise HostError(f"the connection to {self.name} was lost: {why(error)}") from error

    def _exchange(self, channel: paramiko.Channel, data: bytes, output: OutputCollector, end: float) -> None:
        """Feed stdin, drain both streams, wait for the exit status. Raises TimeoutError at `end`."""
        pending: memoryview | None = memoryview(data)
        with selectors.DefaultSelector() as selector:
            selector.register(channel.fileno(), selectors.EVENT_READ)  # readable when either stream is
            while True:
                while channel.recv_ready():
                    output.stdout(channel.recv(_CHUNK))
                while channel.recv_stderr_ready():
                    output.stderr(channel.recv_stderr(_CHUNK))
                left = end - time.monotonic()
                ended = channel.exit_status_ready() and (channel.eof_received or channel.closed)
                if ended and not (channel.recv_ready() or channel.recv_stderr_ready()):
                    return
                if left <= 0:
                    raise TimeoutError
                if pending is not None:
                    pending = _send_some(channel, pending)
                if channel.eof_received or channel.closed:
                    # At EOF the descriptor stays readable for ever; only the exit status is still to come.
                    channel.status_event.wait(min(left, 0.2))
                else:
                    # Bounded, because a lost transport or a free send window does not make it readable.
                    selector.select(min(left, 0.02 if pending is not None else 0.2))

    def _sftp(self) -> paramiko.SFTPClient:
        sftp = self._transport().open_sftp_client()
        sftp.get_channel().settimeout(_SFTP_IDLE_S)
        return sftp

    def _remote_sha256(self, path: str) -> str:
        done = self.run(["sha256sum", "--", path], deadline=3600).check(f"hashing {path}")
        # sha256sum puts a backslash before the hash when it had to escape the file's name.
        return done.stdout.split()[0].removeprefix("\\")

    def _forget(self, part: str) -> None:
        with contextlib.suppress(HostError):
            self.run(["rm", "-f", "--", part], deadline=10)

    def _transport(self) -> paramiko.Transport:
        with self._lock:
            transport = self._client.get_transport() if self._client else None
            if transport is None or not transport.is_active():
                if self._client:
                    self._client.close()
                self._client = None
                self._client = open_client(
                    self.host, self.port, self.user, self.key, self.known_hosts, self.connect_timeout
                )
                transport = self._client.get_transport()
            assert transport is not None
            return transport


def _copy_rest(sftp: paramiko.SFTPClient, remote: str, target: HashingFile) -> None:
    """Append what of the remote file is not in `target` yet."""
    with sftp.open(remote, "rb") as reader:
        size = reader.stat().st_size or 0
        if target.count < size:
            reader.seek(target.count)
            reader.prefetch(size)
            while chunk := reader.read(_CHUNK):
                target.write(chunk)


def _execute(channel: paramiko.Channel, command: str, deadline: float) -> None:
    """Send the command.

    Raises TimeoutError: paramiko itself would wait without limit for a host that is frozen.
    """
    start = time.monotonic()
    guard = threading.Timer(deadline, channel.close)
    guard.daemon = True
    guard.start()
    try:
        channel.exec_command(command)
    except paramiko.SSHException:
        if time.monotonic() - start >= deadline:
            raise TimeoutError from None
        raise
    finally:
        guard.cancel()


def _send_some(channel: paramiko.Channel, pending: memoryview) -> memoryview | None:
    """Send what the window allows; None once everything has been sent and the stream is closed."""
    try:
        while pending and channel.send_ready():
            pending = pending[channel.send(bytes(pending[:_CHUNK])) :]
        if pending:
            return pending
        channel.shutdown_write()
    except OSError:  # the command has ended without reading its input: not our error
        pass
    return None
