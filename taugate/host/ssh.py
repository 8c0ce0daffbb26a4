"""A host over SSH (paramiko): strict host keys, one channel per command, total deadlines, verified copies."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import paramiko

from taugate.errors import DeadlineError, HostError
from taugate.host.sshchannel import by, exchange
from taugate.host.sshconfig import resolve
from taugate.host.sshlogin import LOST, Login, open_login, why
from taugate.host.transport import Completed, HashingFile, OnLine, OutputCollector, partial_of

_CHUNK = 1 << 16
_SFTP_IDLE_S = 60.0
_MAX_LOGINS = 4  # connections at once, where sshd's MaxSessions asks for more than one
_REFUSED_PAUSE_S = 0.2


class SshTransport:
    """See `Transport`. Connects at the first use, and again at the next use after a connection was lost.

    What is None is as the user's OpenSSH configuration says (see sshconfig.py). key: then only that key is tried.
    known_hosts: then the only file consulted. fingerprints: of host keys, in place of any file. connect_timeout:
    seconds for a login, jump hosts included. Raises HostError if the configuration cannot be read.
    """

    def __init__(
        self,
        host: str,
        port: int | None = None,
        user: str | None = None,
        key: Path | None = None,
        known_hosts: Path | None = None,
        connect_timeout: float = 15.0,
        *,
        fingerprints: Sequence[str] = (),
        config: Path | None = None,
    ) -> None:
        self.route = resolve(
            host, port=port, user=user, key=Path(key) if key else None, pins=fingerprints, config=config,
            known_hosts=Path(known_hosts).expanduser() if known_hosts else None,
        )  # fmt: skip
        self.connect_timeout = connect_timeout
        self.name = f"{self.route.user}@{host}" + (f":{self.route.port}" if self.route.port != 22 else "")
        self._lock, self._growing = threading.Lock(), threading.Lock()
        self._logins: list[Login] = []

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
            by(start + deadline, channel, lambda: channel.exec_command(shlex.join(argv)))
            exchange(channel, input or b"", output, start + deadline)
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
        login = self._any_login()
        try:
            channel = login.tcp(port, timeout)
        except paramiko.ChannelException as error:
            if error.code == 2:  # SSH_OPEN_CONNECT_FAILED
                raise ConnectionRefusedError(f"nothing listens on 127.0.0.1:{port} of {self.name}") from None
            raise HostError(
                f"{self.name} does not forward to its port {port} ({error.text}): allow AllowTcpForwarding"
                " local in its sshd"
            ) from error
        except LOST as error:
            raise self._lost(error) from error
        channel.settimeout(timeout)
        return channel

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            logins, self._logins = self._logins, []
        for login in logins:
            login.close()

    def _session(self, timeout: float) -> paramiko.Channel:
        """A new session. Where sshd refuses one more on a connection (MaxSessions), on another connection."""
        end = time.monotonic() + timeout
        while True:
            self._any_login()
            with self._lock:
                logins = list(self._logins)
            refusals: list[paramiko.ChannelException] = []
            for login in logins:
                try:
                    return login.session(max(0.01, end - time.monotonic()))
                except paramiko.ChannelException as error:
                    refusals.append(error)
                except LOST as error:
                    if isinstance(error, EOFError):
                        login.close()  # it cannot be written to, which the thread that reads it may not know yet
                    if login.active or time.monotonic() >= end:
                        raise self._lost(error) from error
            if len(refusals) < len(logins):  # one was lost, and nobody had noticed: nothing has been asked of it yet
                continue
            if len(logins) < _MAX_LOGINS:
                with self._growing:
                    if len(self._logins) <= len(logins):  # else another thread has just made room
                        return self._session_of_a_new_login()
                continue
            if time.monotonic() >= end:
                raise HostError(
                    f"{self.name} refused one more session ({refusals[0].text}) on each of {len(logins)} connections"
                    f" for {timeout:g} s: raise MaxSessions in its sshd"
                ) from refusals[0]
            time.sleep(_REFUSED_PAUSE_S)

    def _session_of_a_new_login(self) -> paramiko.Channel:
        login = open_login(self.route, self.connect_timeout)
        try:  # before any other thread knows of it: a refusal now is not for want of room
            channel = login.session(self.connect_timeout)
        except BaseException as error:
            login.close()
            if isinstance(error, paramiko.ChannelException):
                raise HostError(
                    f"{self.name} lets {self.route.user} in and refuses the first session ({error.text}): allow it in"
                    " its sshd (MaxSessions at least 1)"
                ) from error
            if isinstance(error, LOST):
                raise self._lost(error) from error
            raise
        with self._lock:
            self._logins.append(login)
        return channel

    def _lost(self, error: BaseException) -> HostError:
        return HostError(f"the connection to {self.name} was lost: {why(error)}")

    def _sftp(self) -> paramiko.SFTPClient:
        channel = self._session(self.connect_timeout)
        try:
            by(time.monotonic() + _SFTP_IDLE_S, channel, lambda: channel.invoke_subsystem("sftp"))
            channel.settimeout(_SFTP_IDLE_S)
            return paramiko.SFTPClient(channel)
        except BaseException:
            channel.close()
            raise

    def _remote_sha256(self, path: str) -> str:
        done = self.run(["sha256sum", "--", path], deadline=3600).check(f"hashing {path}")
        # sha256sum puts a backslash before the hash when it had to escape the file's name.
        return done.stdout.split()[0].removeprefix("\\")

    def _forget(self, part: str) -> None:
        with contextlib.suppress(HostError):
            self.run(["rm", "-f", "--", part], deadline=10)

    def _any_login(self) -> Login:
        """A connection that is alive; a new one if there is none."""
        with self._lock:
            for dead in [login for login in self._logins if not login.active]:
                dead.close()
                self._logins.remove(dead)
            if not self._logins:
                self._logins.append(open_login(self.route, self.connect_timeout))
            return self._logins[0]


def _copy_rest(sftp: paramiko.SFTPClient, remote: str, target: HashingFile) -> None:
    """Append what of the remote file is not in `target` yet."""
    with sftp.open(remote, "rb") as reader:
        size = reader.stat().st_size or 0
        if target.count < size:
            reader.seek(target.count)
            reader.prefetch(size)
            while chunk := reader.read(_CHUNK):
                target.write(chunk)
