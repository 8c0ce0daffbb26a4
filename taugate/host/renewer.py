"""Keeping a lease alive from a thread of its own, and noticing when it is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from taugate.errors import HostError, LeaseLost
from taugate.host.lease import Lease


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
