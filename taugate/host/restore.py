"""Bringing the server back: start it, see the same identity answer, see real requests succeed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from taugate.errors import DeadlineError, HostError, LeaseLost, WindowError
from taugate.host.host import Host
from taugate.host.lease import Lease
from taugate.host.record import WindowSettings
from taugate.host.sglang import Generation, ServerIdentity
from taugate.polling import poll

T = TypeVar("T")
_MAX_STARTS_AFTER_FAILURE = 1
_RESTART_IDLE_S = 5.0  # a start command that had no effect is given again after this
_FIRST_PAUSE_S = 0.1  # small servers are back at once
_SURE = 3  # a wrong identity must be read this often before it is believed


class Restore:
    """The steps of a restore. All may be repeated: an interrupted restore simply begins again."""

    def __init__(
        self,
        host: Host,
        settings: WindowSettings,
        lease: Lease,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._host, self._settings, self._lease = host, settings, lease
        self._clock, self._sleep = clock, sleep
        self._trouble = ""

    def persist(self, action: Callable[[], T], what: str) -> T:
        """Do `action`, again and again for `persist_s` while the host does not answer or refuses.

        Raises HostError.
        """
        end = self._clock() + self._settings.persist_s
        while True:
            try:
                return action()
            except (LeaseLost, WindowError):
                raise
            except (HostError, OSError) as error:
                if self._clock() >= end:
                    raise WindowError(f"{what} failed for {self._settings.persist_s:g} s: {error}") from error
                self._sleep(2.0)

    def stop_jobs(self) -> None:
        """Stop every job of this window. Raises WindowError."""
        self.persist(self._lease.end_jobs, "stopping the window's jobs")

    def start(self, expected: ServerIdentity) -> ServerIdentity:
        """Start the unit and wait until `expected` answers. Raises WindowError with what was seen last."""
        name = self._host.unit.name
        self.persist(lambda: self._lease.start(name), f"starting {name}")
        self._failures = self._wrong = 0
        self._started = self._clock()
        self._trouble = "nothing was heard from it"
        try:
            return poll(
                lambda: self._serving(expected),
                deadline=self._settings.start_timeout_s,
                what=f"serving by {self._host.unit.name}",
                interval=self._settings.poll_s,
                first=_FIRST_PAUSE_S,
                clock=self._clock,
                sleep=self._sleep,
            )
        except DeadlineError as error:
            raise WindowError(f"{error}: {self._trouble}") from error

    def verify(self) -> list[Generation] | None:
        """Real generations, all of which must succeed; the first can be compared with the canary.

        The others begin elsewhere in the same prompt, so that no cache has them.

        None if the unit has stopped meanwhile, so that it must be started again. Raises WindowError.
        """
        count = max(2, self._settings.verify_requests)
        answers: list[Generation] = []
        for number in range(count):
            answer = self.persist(lambda shift=number: self._generate(shift), f"test request {number + 1} of {count}")
            if answer is None:
                return None
            answers.append(answer)
        return answers

    def _generate(self, shift: int) -> Generation | None:
        try:
            return take_canary(self._host, self._settings, shift)
        except HostError:
            if self._host.unit.show().active != "active":
                return None
            raise

    def broken(self, why: str, timer: str, lost: str | None) -> str:
        """The sentence for a server that did not come back: why, what the host will do, what a person can
        do.
        """
        name = self._host.unit.name
        if lost:
            host_does = f"the host's dead-man timer has already run ({lost})"
        else:
            host_does = f"the host starts it by itself within {self._settings.ttl_s:g} s ({timer} stays armed)"
        by_hand = self._host.by_hand(f"systemctl start {name}")
        return f"{name} on {self._host.name} was not restored: {why}; {host_does}; by hand: `{by_hand}`"

    def _serving(self, expected: ServerIdentity) -> ServerIdentity | None:
        try:
            return self._look(expected)
        except WindowError:
            raise
        except HostError as error:
            self._trouble = str(error)
            return None

    def _look(self, expected: ServerIdentity) -> ServerIdentity | None:
        unit = self._host.unit
        state = unit.show()
        if state.active == "failed":
            if self._failures >= _MAX_STARTS_AFTER_FAILURE:
                raise WindowError(
                    f"{unit.name} failed again after it was started (result {state.result}): see its journal"
                )
            self._failures += 1
            self._start_again()
        elif state.active == "inactive" and self._clock() - self._started >= _RESTART_IDLE_S:
            self._start_again()
        if state.active != "active":
            self._trouble = f"the unit is {state.active} ({state.sub})"
            return None
        if not self._host.server.ready():
            self._trouble = "the unit is active but the server is not ready"
            return None
        identity = self._host.server.identity()
        if differences := identity.differs_from(expected):
            self._wrong += 1
            self._trouble = f"another server answers: {'; '.join(differences)}"
            if self._wrong >= _SURE:
                raise WindowError(self._trouble)
            return None
        return identity

    def _start_again(self) -> None:
        self._started = self._clock()
        self._lease.start(self._host.unit.name)


def take_canary(host: Host, settings: WindowSettings, shift: int = 0) -> Generation:
    """The canary's greedy continuation from the running server; shift: of its ids rotated by so many.

    Raises HostError.
    """
    ids, tokens = settings.canary_input_ids, settings.canary_tokens
    ids = ids[shift % len(ids) :] + ids[: shift % len(ids)]
    return host.server.generate(ids, tokens, top_logprobs=2, deadline=settings.request_timeout_s)
