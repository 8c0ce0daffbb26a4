"""Waiting for the world: poll a predicate until it holds or a deadline passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from taugate.errors import DeadlineError

T = TypeVar("T")


def poll(
    probe: Callable[[], T | None],
    *,
    deadline: float,
    what: str,
    interval: float = 0.25,
    first: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `probe` every `interval` seconds until it returns something truthy, and return that.

    first: the first pause in seconds, if it is to be shorter; those after it grow by half each, up to `interval`.
    Raises DeadlineError naming `what` once `deadline` seconds have passed without one.
    """
    start = clock()
    pause = min(first or interval, interval)
    while True:
        value = probe()
        if value:
            return value
        if clock() - start >= deadline:
            raise DeadlineError(f"{what} did not happen within {deadline:g} s")
        sleep(min(pause, max(0.0, deadline - (clock() - start))))
        pause = min(1.5 * pause, interval)
