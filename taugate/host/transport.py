"""What a host can do for us: run a command, move a file, reach a port on its loopback.

Two kinds exist: ssh and local.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from taugate.errors import HostError

OnLine = Callable[[str], None]


def last_line(text: str) -> str:
    """The last line of `text` that is not blank, without surrounding spaces; "" if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


@dataclass(frozen=True)
class Completed:
    """A command that has ended.

    rc: exit status; None = unknown (connection lost, or killed by a signal). seconds: wall-clock time.
    stdout, stderr: whole output, UTF-8 with undecodable bytes replaced. host: where it ran, for messages.
    """

    argv: tuple[str, ...]
    rc: int | None
    stdout: str
    stderr: str
    seconds: float
    host: str = ""

    def check(self, what: str) -> Completed:
        """Return self if the exit status is 0; otherwise raise HostError with one sentence that starts with
        `what`.
        """
        if self.rc == 0:
            return self
        if self.rc is None:
            end = f"without an exit status after {self.seconds:.1f} s (connection lost or killed by a signal)"
        else:
            end = f"with exit status {self.rc}"
        said = last_line(self.stderr) or last_line(self.stdout)
        where = f" on {self.host}" if self.host else ""
        tail = f": {said}" if said else ""
        raise HostError(f"{what} failed{where}: `{self.argv[0]}` ended {end}{tail}")


class Transport(Protocol):
    """A way to a host. Safe to use from several threads at once."""

    name: str

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline: float,
        input: bytes | None = None,
        on_line: OnLine | None = None,
    ) -> Completed:
        """Run `argv` (no shell syntax is interpreted) and wait for its end and the end of its output.

        deadline: seconds in total. on_line: called in the caller's thread with each complete line of stdout.
        A non-zero exit is a value, not an error. Raises DeadlineError (the command may still be running on
        the host) and HostError (no connection). A connection lost half-way gives rc None.
        """
        ...

    def put(self, local: Path, remote: str) -> str:
        """Copy a file to the host under a temporary name, compare SHA-256, rename.

        Returns the hex SHA-256.
        """
        ...

    def get(
        self,
        remote: str,
        local: Path,
        *,
        resume: bool = False,
        on_bytes: Callable[[int], None] | None = None,
    ) -> str:
        """Copy a file from the host under a temporary name, compare SHA-256, rename.

        resume: what an interrupted copy has brought over is kept beside `local`, and the next one goes on from there.
        on_bytes: called with the number of bytes that are here, now and then. Returns the hex SHA-256.
        """
        ...

    def open_tcp(self, port: int, timeout: float) -> Any:
        """A connected socket-like object (sendall, recv, settimeout, close) to 127.0.0.1:`port` on the host.

        Raises ConnectionRefusedError if nothing listens there, HostError if the host cannot be reached.
        """
        ...

    def close(self) -> None:
        """Give the connection back; a second call does nothing."""
        ...


class OutputCollector:
    """Gathers the two output streams of a command and hands complete lines of stdout to `on_line`."""

    def __init__(self, on_line: OnLine | None) -> None:
        self._on_line = on_line
        self._decoders = tuple(codecs.getincrementaldecoder("utf-8")("replace") for _ in range(2))
        self._parts: tuple[list[str], list[str]] = ([], [])
        self._rest = ""

    def stdout(self, data: bytes) -> None:
        self._feed(0, data, final=False)

    def stderr(self, data: bytes) -> None:
        self._feed(1, data, final=False)

    def finish(self) -> tuple[str, str]:
        """Flush what is left (a last line without newline counts as a line) and return (stdout, stderr)."""
        self._feed(0, b"", final=True)
        self._feed(1, b"", final=True)
        if self._on_line and self._rest:
            self._on_line(self._rest)
        self._rest = ""
        return "".join(self._parts[0]), "".join(self._parts[1])

    def _feed(self, stream: int, data: bytes, final: bool) -> None:
        text = self._decoders[stream].decode(data, final)
        self._parts[stream].append(text)
        if stream == 0 and self._on_line and text:
            # Split on \n only: a progress bar's \r, or a Unicode line separator in JSON, must not cut a
            # record.
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._on_line(line.removesuffix("\r"))


def partial_of(local: Path, resume: bool) -> Path:
    """Where a file on its way to `local` lies: under a name of its own, or one that the next copy finds again."""
    return local.with_name(f".{local.name}.part" + ("" if resume else f"-{os.urandom(4).hex()}"))


class HashingFile:
    """A file object that hashes what passes through it; `count` is the number of bytes.

    stream: open for reading, or open for writing and, if `goes_on`, for reading too: what it holds counts as passed.
    """

    def __init__(
        self, stream: BinaryIO, goes_on: bool = False, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self._on_bytes = on_bytes or (lambda count: None)
        self.hexdigest = self._digest.hexdigest
        self.count = 0
        while goes_on and self.read(1 << 20):
            pass

    def read(self, size: int) -> bytes:
        return self._passed(self._stream.read(size))

    def write(self, data: bytes) -> int:
        self._stream.write(data)
        return len(self._passed(data))

    def _passed(self, data: bytes) -> bytes:
        self._digest.update(data)
        self.count += len(data)
        self._on_bytes(self.count)
        return data
