"""The lease: the right to change things on the host, held by one window at a time, taken back by the host.

It is a transient systemd timer there, which restores the server unless it is renewed in time: dead-man, lock
and lease in one. It lives in the host's PID 1, so it needs neither us nor the network. Every change that a window
makes goes through here and is checked against it on the host (see helper.py).
"""

from __future__ import annotations

import getpass
import re
import socket

from taugate.errors import HostError, LeaseLost, WindowError
from taugate.host.helper import IN_USE, NOT_HELD, NOT_SO, QUARANTINED, Helper
from taugate.host.transport import Completed, Transport, last_line
from taugate.host.unit import valid_unit_name

JOB_GLOB = "taugate-job-*.service"
DEFAULT_STATE_DIR = "/var/tmp/taugate"
_WINDOW_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOT_OF_AN_OWNER = re.compile(r"[^A-Za-z0-9@._-]")


class Lease:
    """The host's lease as `window_id` (letters, digits, _ and -) uses it.

    owner: shown to who is locked out. state_dir: where the host keeps the note of a failed restore (the installed
    helper has its own place for that). sudo: see Helper.
    """

    timer = "taugate-window.timer"

    def __init__(
        self,
        transport: Transport,
        window_id: str = "",
        owner: str | None = None,
        state_dir: str = DEFAULT_STATE_DIR,
        sudo: bool = False,
    ) -> None:
        if not _WINDOW_ID.fullmatch(window_id):
            raise HostError(f"{window_id!r} is not a window id: use letters, digits, _ and -")
        self.window_id = window_id
        self.owner = _NOT_OF_AN_OWNER.sub("_", owner or f"{getpass.getuser()}@{socket.gethostname()}")
        self.state_dir = state_dir
        self._helper = Helper(transport, sudo)
        self._where = transport.name

    def arm(self, ttl_s: float, service: str, port: int, beside: bool = False) -> None:
        """Take the lease: in `ttl_s` seconds the host stops our jobs and starts `service` (on `port`).

        beside: the service is never stopped, so the host only ends our jobs. Raises WindowError (somebody else's
        window is open, or the last restore failed), HostError if systemd does not load it.
        """
        ttl, service = str(max(1, round(ttl_s))), valid_unit_name(service)
        kind = ["beside"] if beside else []
        done = self._helper.call("arm", self.window_id, ttl, service, str(port), self.state_dir, self.owner, *kind)
        if done.rc == IN_USE:
            raise self._in_use(last_line(done.stdout))
        if done.rc == QUARANTINED:
            raise WindowError(
                f"{self._where} takes no windows, because the last one did not give the server back"
                f" ({last_line(done.stdout)}): look at the server, then"
                f" `python -m taugate host restore --host {self._where} --service {service}`"
            )
        done.check(f"arming the dead-man timer {self.timer}")

    def require_free(self) -> None:
        """Raise WindowError if another window is open on the host.

        Raises HostError if the host does not answer.
        """
        if holder := self.holder():
            raise self._in_use(holder)

    def holder(self) -> str | None:
        """The description of whichever window holds the lease now; None if none does. Raises HostError."""
        return last_line(self._helper.call("holder").check("reading the lease").stdout) or None

    def is_mine(self, holder: str) -> bool:
        """Whether a description given by `holder` is this window's."""
        return holder.startswith(f"taugate window {self.window_id} ")

    def alive(self) -> bool:
        """Whether this window holds the lease. Raises HostError if the host does not answer."""
        done = self._helper.call("held", self.window_id)
        return done.rc != NOT_HELD and done.check("looking at the lease").rc == 0

    def renew(self) -> None:
        """Move the deadline to a full TTL from now. Raises LeaseLost, HostError."""
        self._do("renew", self.window_id)

    def disarm(self, while_active: str | None = None) -> bool:
        """Give the lease back. Raises LeaseLost, HostError.

        while_active: the service that must be active at that moment; if it is not, the timer stays and the
        answer is False.
        """
        service = [] if while_active is None else [valid_unit_name(while_active)]
        done = self._helper.call("disarm", self.window_id, *service)
        return done.rc != NOT_SO and self._judge(done, "disarm").rc == 0

    def stop(self, service: str) -> None:
        """Ask systemd to stop `service`, and return at once. Raises LeaseLost, HostError."""
        self._do("stop", self.window_id, service)

    def start(self, service: str) -> None:
        """Forget failed starts, ask systemd to start `service`, and return at once. Needs no lease.

        Raises WindowError if the host is in somebody else's window, HostError.
        """
        done = self._helper.call("start", self.window_id, service)
        if done.rc == IN_USE:
            raise WindowError(last_line(done.stderr))
        done.check(f"starting {service}")

    def end_jobs(self) -> None:
        """Stop every job of this window. Raises HostError."""
        self._helper.call("end-jobs", self.window_id, deadline=120.0).check("stopping the window's jobs")

    def kill_leftovers(self, service: str) -> Completed:
        """SIGKILL what the stopped `service` left in its control group. Raises LeaseLost."""
        return self._fenced(self._helper.call("kill", self.window_id, service))

    def kill(self, service: str, pid: int, start_time: int) -> Completed:
        """SIGKILL one process of the stopped `service`, if it still is the one that began at `start_time`."""
        return self._fenced(self._helper.call("kill-pid", self.window_id, service, str(pid), str(start_time)))

    def quarantine(self, why: str) -> None:
        """Let no new window open until a restore has succeeded or a person has looked. Raises HostError."""
        text = " ".join(why.split())
        self._helper.call("quarantine", self.window_id, self.state_dir, text).check("noting the failed restore")

    def _do(self, command: str, *args: str) -> None:
        self._judge(self._helper.call(command, *args), command)

    def _judge(self, done: Completed, command: str) -> Completed:
        if done.rc == 5:  # the timer went between the helper's look and its act
            raise self.lost()
        return self._fenced(done).check(f"{command} of window {self.window_id}")

    def _fenced(self, done: Completed) -> Completed:
        if done.rc == NOT_HELD:
            raise self.lost()
        return done

    def lost(self) -> LeaseLost:
        """The error for a lease that is no longer ours."""
        return LeaseLost(
            f"window {self.window_id} has lost its lease: {self.timer} on {self._where} has run out or was"
            " taken, and the host has started the server itself"
        )

    def _in_use(self, holder: str) -> WindowError:
        return WindowError(
            f"{self._where} is in use by `{holder}`: wait until that window closes, or if it is dead until"
            f" its timer {self.timer} has restored the server"
        )
