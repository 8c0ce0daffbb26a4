"""This machine as the host: the contract of `Transport` over subprocesses."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from taugate.errors import DeadlineError, HostError
from taugate.files import sha256_file
from taugate.host.transport import Completed, HashingFile, OnLine, OutputCollector

_CHUNK = 1 << 16


class LocalTransport:
    """Runs commands on this machine.

    A command gets its own session, so that Ctrl-C reaches only the caller.
    """

    def __init__(self, name: str = "this machine") -> None:
        self.name = name

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline: float,
        input: bytes | None = None,
        on_line: OnLine | None = None,
    ) -> Completed:
        """See `Transport.run`. A program that does not exist gives rc 127, as a remote shell would."""
        start = time.monotonic()
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError:
            return Completed(tuple(argv), 127, "", f"{argv[0]}: not found", 0.0, self.name)
        except OSError as error:
            return Completed(tuple(argv), 126, "", f"{argv[0]}: {error.strerror}", 0.0, self.name)
        output = OutputCollector(on_line)
        try:
            _exchange(process, input, output, start + deadline)
            process.wait(max(0.0, start + deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise DeadlineError(
                f"`{shlex.join(argv)}` on {self.name} did not end within {deadline:g} s; what it started may"
                " still be running"
            ) from None
        finally:
            _end(process)
        stdout, stderr = output.finish()
        rc = process.returncode if process.returncode >= 0 else None
        return Completed(tuple(argv), rc, stdout, stderr, time.monotonic() - start, self.name)

    def put(self, local: Path, remote: str) -> str:
        return self._copy(local, Path(remote))

    def get(
        self,
        remote: str,
        local: Path,
        *,
        resume: bool = False,  # a copy on one machine is not worth going on with
        on_bytes: Callable[[int], None] | None = None,
    ) -> str:
        return self._copy(Path(remote), local, on_bytes)

    def open_tcp(self, port: int, timeout: float) -> socket.socket:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout)
        except ConnectionRefusedError:
            raise
        except OSError as error:
            raise HostError(f"port {port} of {self.name} cannot be reached: {error}") from error

    def close(self) -> None:
        pass

    def _copy(self, source: Path, target: Path, on_bytes: Callable[[int], None] | None = None) -> str:
        part = target.with_name(f"{target.name}.part-{os.urandom(4).hex()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(source, "rb") as reader, open(part, "wb") as writer:
                copied = HashingFile(reader, on_bytes=on_bytes)
                while chunk := copied.read(1 << 20):
                    writer.write(chunk)
                writer.flush()
                os.fsync(writer.fileno())
            digest = sha256_file(part)
            if digest != sha256_file(source):
                raise HostError(f"{source} changed while it was copied to {target}: copy it again")
            os.replace(part, target)
        except OSError as error:
            raise HostError(f"{source} could not be copied to {target} on {self.name}: {error}") from error
        finally:
            part.unlink(missing_ok=True)
        return digest


def _exchange(process: subprocess.Popen[bytes], data: bytes | None, output: OutputCollector, end: float) -> None:
    """Feed stdin and drain both streams until both are at EOF.

    Raises TimeoutError at `end` (monotonic seconds).
    """
    assert process.stdout and process.stderr
    pending = memoryview(data or b"")
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, output.stdout)
        selector.register(process.stderr, selectors.EVENT_READ, output.stderr)
        if process.stdin:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        while selector.get_map():
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    pending = _write_some(process, pending)
                    if not pending:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                elif chunk := os.read(key.fd, _CHUNK):
                    key.data(chunk)
                else:
                    selector.unregister(key.fileobj)


def _write_some(process: subprocess.Popen[bytes], pending: memoryview) -> memoryview:
    try:
        return pending[os.write(process.stdin.fileno(), pending[:_CHUNK]) :] if pending else pending
    except BrokenPipeError:  # the command does not read its input: not our error
        return pending[:0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing behind: kill the session if it still runs, reap it, close the pipes."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            stream.close()
