"""Progress bars: one line that is redrawn on a terminal, and a line now and then where there is none.

A text that begins with a carriage return is meant to be redrawn; whoever shows it may leave it out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Say = Callable[[str], None]

_WIDTH, _REDRAW_S, _LINE_S = 24, 0.2, 15.0


class Bar:
    """A bar for one step of known size. every: seconds between lines that stay; the last line always comes."""

    def __init__(
        self, say: Say, what: str, *, every: float = _LINE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._what, self._every, self._clock = say, what, every, clock
        self._drawn, self._said = -_REDRAW_S, clock()

    def __call__(self, done: float, of: float, detail: str = "") -> None:
        """Show that `done` of `of` are done, with `detail` behind the bar."""
        now = self._clock()
        line = f"{self._what} {draw(done / of if of else 1.0)} {detail}".rstrip()
        if done >= of or now - self._said >= self._every:
            self._said = self._drawn = now
            self._say(line)
        elif now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._say(f"\r{line}")


class CaptureBar:
    """Shows the events of a capture (`taugate.target.worker`) and of hashing (`taugate.target.checkpoint`)."""

    def __init__(self, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._capture, self._hash = Bar(say, "capture", clock=clock), Bar(say, "hashing weights", clock=clock)

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "loading" and event["done"] < event["of"]:
            self._say(f"loading the target on {event['device']}; {event['done']}/{event['of']} sequences are there")
        elif kind == "layer":
            layer = f"layer {event['layer'] + 1}/{event['of']}, {event['prompts']} prompts"
            detail = f"{layer}, {size(event['bytes'])} of weights, {duration(event['left_s'])} left"
            if event["layer"] + 1 < event["of"]:  # the last layer is followed by the states themselves
                self._capture(event["layer"] + 1, event["of"], detail)
        elif kind == "state":
            detail = f"{event['done']}/{event['of']} prompts, {size(event['bytes'])}, {duration(event['left_s'])} left"
            self._capture(event["done"], event["of"], detail)
        elif kind == "hashing":
            done, of = event["done_bytes"], event["of_bytes"]
            self._hash(done, of, f"{size(done)} of {size(of)}, {event['file']}, {duration(event['left_s'])} left")


def draw(share: float, width: int = _WIDTH) -> str:
    """A bar of `width` characters in brackets; full only when share is 1."""
    filled = min(width, int(max(0.0, share) * width))
    return f"[{'#' * filled}{'.' * (width - filled)}]"


def size(count: float) -> str:
    """Bytes with a unit: "3.1 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def duration(seconds: float) -> str:
    """Minutes and seconds: "1:05"."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"
