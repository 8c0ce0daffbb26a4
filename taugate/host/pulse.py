"""Noticing that the machine at the other end of an SSH connection no longer answers, wherever the link is cut."""

from __future__ import annotations

import contextlib
import threading

import paramiko

INTERVAL_S = 5.0
SILENT_S = 30.0


class Pulse:
    """Asks the server for a sign of life every INTERVAL_S, and closes the connection when it gives none for SILENT_S.

    The kernel notices a dead TCP link by itself, but not one behind a jump host, nor a server that is frozen.
    paramiko's own keepalives wait for no answer.
    """

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport, self._end = transport, threading.Event()
        threading.Thread(target=self._beat, name="taugate-pulse", daemon=True).start()

    def stop(self) -> None:
        self._end.set()

    def _beat(self) -> None:
        while not self._end.wait(INTERVAL_S) and self._transport.is_active():
            silent = threading.Timer(SILENT_S, self._transport.close)
            silent.daemon = True
            silent.start()
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                self._transport.global_request("keepalive@openssh.com")  # a refusal is an answer
            silent.cancel()
