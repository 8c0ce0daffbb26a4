"""Recordings of the real server, and how an answer of the stand-in may differ from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parents[1] / "fixtures" / "contract"
STATES = ("loading", "ready", "stop-mixed", "stop-control-group", "crash")


def recorded(state: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / f"{state}.json").read_text())


def differences(theirs: Any, ours: Any, where: str = "") -> Iterator[str]:
    """What the stand-in's JSON value has that the real one has not: a key, or a value of another type.

    Lists of equal length are compared place by place, others with the first of theirs. null says nothing of
    a type.
    """
    if theirs is None or ours is None:
        return
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key, value in ours.items():
            if key in theirs:
                yield from differences(theirs[key], value, f"{where}.{key}")
            else:
                yield f"{where}.{key}: the real server does not say that"
    elif isinstance(theirs, list) and isinstance(ours, list):
        for index, value in enumerate(ours):
            if theirs:
                other = theirs[index] if len(theirs) == len(ours) else theirs[0]
                yield from differences(other, value, f"{where}[{index}]")
    elif type(theirs) is not type(ours):
        yield f"{where}: {type(ours).__name__}, and the real server says {theirs!r}"


def value_at(value: Any, path: str) -> Any:
    """`a.0.b` of a JSON value. Raises KeyError or IndexError."""
    for part in filter(None, path.split(".")):
        value = value[int(part) if part.isdecimal() else part]
    return value


def at(timeline: list[dict[str, Any]], second: float) -> dict[str, int]:
    """The status of each path at a second of a timeline."""
    return {change["path"]: change["status"] for change in timeline if change["seconds"] <= second}


def sequence(timeline: list[dict[str, Any]], path: str) -> list[int]:
    """The statuses of a path, one after the other."""
    return [status for status, _ in groupby(change["status"] for change in timeline if change["path"] == path)]
