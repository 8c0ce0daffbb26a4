"""One command over one SSH channel: input fed, both streams drained, the end awaited, all within one deadline."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable

import paramiko

from taugate.host.transport import OutputCollector

_CHUNK = 1 << 16


def by(end: float, channel: paramiko.Channel, action: Callable[[], None]) -> None:
    """Do `action` on `channel`, which is closed at `end` (monotonic): paramiko waits without limit for a frozen host.

    Raises TimeoutError, and what `action` raises.
    """
    guard = threading.Timer(max(0.0, end - time.monotonic()), channel.close)
    guard.daemon = True
    guard.start()
    try:
        action()
    except paramiko.SSHException:
        if time.monotonic() >= end:
            raise TimeoutError from None
        raise
    finally:
        guard.cancel()


def exchange(channel: paramiko.Channel, data: bytes, output: OutputCollector, end: float) -> None:
    """Feed stdin, drain both streams, wait for the exit status. Raises TimeoutError at `end` (monotonic)."""
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
