"""The dead-man: a transient systemd timer on the host that starts the server again unless it is renewed in
time.

Its unit name is the lock: only one can be loaded. It lives in the host's PID 1, so it needs neither us nor
the network.
"""

from __future__ import annotations

import getpass
import re
import socket
import threading
import time
from collections.abc import Callable

from taugate.errors import HostError, LeaseLost, WindowError
from taugate.host.transport import Completed, Transport
from taugate.host.unit import COMMAND_DEADLINE_S, run_while_active, show_properties, valid_unit_name

JOB_GLOB = "taugate-job-*.service"
_WINDOW_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Lease:
    """The timer `unit` on the host, held under `window_id` (letters, digits, _ and -).

    owner: shown to who is locked out.
    """

    def __init__(
        self,
        transport: Transport,
        unit: str = "taugate-window",
        window_id: str = "",
        owner: str | None = None,
    ) -> None:
        if not _WINDOW_ID.fullmatch(window_id):
            raise HostError(f"{window_id!r} is not a window id: use letters, digits, _ and -")
        self.unit = unit
        self.timer = valid_unit_name(f"{unit}.timer")
        self.window_id = window_id
        self.owner = owner or f"{getpass.getuser()}@{socket.gethostname()}"
        self._transport = transport

    def arm(self, ttl_s: float, service: str) -> None:
        """Load the timer: in `ttl_s` seconds it stops our jobs and starts `service`.

        Raises WindowError if somebody else's window is open, HostError if systemd does not load it.
        """
        valid_unit_name(service)  # it goes into a shell line below
        restore = (
            f"systemctl stop '{JOB_GLOB}'; systemctl reset-failed {service}; exec systemctl start {service}"
        )
        argv = [
            "systemd-run", "--quiet", "--collect", f"--unit={self.unit}",
            f"--on-active={max(1, round(ttl_s))}s",
            "--timer-property=AccuracySec=100ms",  # the default is a minute
            "--property=Type=oneshot", "--property=Restart=on-failure", "--property=RestartSec=5s",
            f"--description=taugate window {self.window_id} {self.owner}",
            "/bin/sh", "-c", restore,
        ]  # fmt: skip
        done = self._transport.run(argv, deadline=COMMAND_DEADLINE_S)
        if done.rc == 0:
            return
        holder = self.holder()
        if holder and self.is_mine(holder):  # the answer was lost, not the command
            return
        self._require_free(holder)
        done.check(f"arming the dead-man timer {self.timer}")

    def require_free(self) -> None:
        """Raise WindowError if another window is open on the host.

        Raises HostError if the host does not answer.
        """
        self._require_free(self.holder())

    def holder(self) -> str | None:
        """The description of whichever window's timer is waiting on the host now; None if none is.

        Raises HostError.
        """
        state = show_properties(self._transport, self.timer, "LoadState,ActiveState,SubState,Description")
        # SubState is "running" while the timer's service runs, "elapsed" after: too late in both cases.
        armed = state.get("ActiveState") == "active" and state.get("SubState") not in ("running", "elapsed")
        return state.get("Description", "unknown") if armed else None

    def is_mine(self, holder: str) -> bool:
        """Whether a description given by `holder` is this window's."""
        return holder.startswith(f"taugate window {self.window_id} ")

    def alive(self) -> bool:
        """Whether the timer is waiting and is ours. Raises HostError if the host does not answer."""
        holder = self.holder()
        return holder is not None and self.is_mine(holder)

    def renew(self) -> None:
        """Move the deadline to a full TTL from now.

        Raises LeaseLost if the timer is gone or not ours, HostError.
        """
        self._require_ours()
        self._timer("restart")

    def disarm(self, while_active: str | None = None) -> bool:
        """Unload the timer. Raises LeaseLost if it was already gone or is not ours, HostError.

        while_active: the service that must be active at that moment; if it is not, the timer stays and the
        answer is False.
        """
        self._require_ours()
        if while_active is None:
            self._timer("stop")
            return True
        done = run_while_active(self._transport, while_active, ["systemctl", "stop", self.timer])
        if done.rc in (3, 4):
            return False
        self._judge(done, "stop")
        return True

    def _require_free(self, holder: str | None) -> None:
        if holder:
            raise WindowError(
                f"{self._transport.name} is in use by `{holder}`: wait until that window closes, or if it is"
                " dead"
                f" until its timer {self.timer} has restored the server"
            )

    def _timer(self, verb: str) -> None:
        self._judge(self._transport.run(["systemctl", verb, self.timer], deadline=COMMAND_DEADLINE_S), verb)

    def _judge(self, done: Completed, verb: str) -> None:
        if done.rc == 5:
            raise self._lost()
        done.check(f"{verb} of {self.timer}")

    def _require_ours(self) -> None:
        # The timer's name is shared by all windows: after an expiry it may be the next borrower's.
        if not self.alive():
            raise self._lost()

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            f"window {self.window_id} has lost its lease: {self.timer} on {self._transport.name} has run out"
            " or was"
            " taken, and the host has started the server itself"
        )


class Renewer:
    """Renews a lease every third of its TTL, in a thread of its own.

    watch: called after each renewal; a text it returns means that the window is lost (who took it).
    lost: None, or the sentence that says why the window may no longer be used.
    """

    def __init__(self, lease: Lease, ttl_s: float, watch: Callable[[], str | None] = lambda: None) -> None:
        self.lost: str | None = None
        self._lease, self._ttl_s, self._watch = lease, ttl_s, watch
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="taugate-lease", daemon=True)

    @property
    def stopped(self) -> bool:
        """Whether no renewal will be begun any more."""
        return self._end.is_set()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """End the thread. A renewal under way is waited for, at most `timeout` seconds."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _loop(self) -> None:
        renewed = time.monotonic()
        pause = self._ttl_s / 3
        while not self._end.wait(pause):
            begun = time.monotonic()
            try:
                self._lease.renew()
                renewed, pause = begun, self._ttl_s / 3
                self.lost = self._watch()
            except LeaseLost as error:
                self.lost = str(error)
            except HostError as error:
                # The host may merely be out of reach for a moment: try more often, until the TTL is over for
                # sure.
                pause = self._ttl_s / 15
                if time.monotonic() - renewed >= self._ttl_s:
                    self.lost = f"the lease could not be renewed for {self._ttl_s:g} s ({error})"
            if self.lost:
                return
