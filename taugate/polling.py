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
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `probe` every `interval` seconds until it returns something truthy, and return that.

    Raises DeadlineError naming `what` once `deadline` seconds have passed without one.
    """
    start = clock()
    while True:
        value = probe()
        if value:
            return value
        if clock() - start >= deadline:
            raise DeadlineError(f"{what} did not happen within {deadline:g} s")
        sleep(min(interval, max(0.0, deadline - (clock() - start))))
