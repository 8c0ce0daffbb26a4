"""What lies behind the τ of each drafter, and how it went from checkpoint to checkpoint, as plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from taugate.report.columns import table

Record = dict[str, Any]
REFERENCE = "reference"


def profile_lines(measured: Sequence[Record]) -> list[str]:
    """Conditional acceptance and sampling acceptance by slot, and how many cycles emitted how much, of each chain."""
    seen = [(m["drafter"], m["profile"]) for m in measured if m["verifier"] == "chain" and _whole(m)]
    if not seen:
        return []
    slots = max(len(p["tried"]) for _, p in seen)
    rows = []
    for drafter, p in seen:
        rates = [_rate(m, t) for m, t in zip(p["matched"], p["tried"], strict=True)]
        rows.append((drafter, "accepted if all before were", *rates))
        if p.get("overlap"):
            rows.append((drafter, f"Σ min(p, q) at T = {p['temperature']:g}", *(f"{x:.3f}" for x in p["overlap"])))
    padded = [row + ("-",) * (slots + 2 - len(row)) for row in rows]
    lines = table(("by slot", "", *map(str, range(1, slots + 1))), padded, right=set(range(2, slots + 2)))
    counts = [(drafter, "", *map(str, p["histogram"])) for drafter, p in seen]
    width = max(map(len, counts))
    counts = [row + ("0",) * (width - len(row)) for row in counts]
    lines += ["", *table(("cycles by tokens", "", *map(str, range(1, width - 1))), counts, right=set(range(2, width)))]
    for drafter, p in seen:
        sampled = f"; rejection sampling would emit {p['sampled']:.3f} tokens a cycle" if p.get("sampled") else ""
        cut = f"{p['cut']} cycles cut by the end of the text, {p['shrunk']} blocks by the length cap"
        lines.append(f"  {drafter}: {cut}{sampled}")
    return lines


def calibration_lines(measured: Sequence[Record]) -> list[str]:
    """What each drafter itself expects of its trees, 1 + Σ q, beside what came, over cycles that nothing cut."""
    rows = []
    for m in measured:
        p = m.get("profile") or {}
        if p.get("predicted") is not None:
            expected, emitted = p["predicted"], p["realised"]
            numbers = f"{expected:.3f}", f"{emitted:.3f}", f"{expected - emitted:+.3f}"
            rows.append((m["drafter"], m["verifier"], *numbers))
    return table(("calibration", "", "1 + Σ q", "emitted", "difference"), rows, right={2, 3, 4}) if rows else []


def trend_lines(measured: Sequence[Record]) -> list[str]:
    """τ(chain) from checkpoint to checkpoint, if several were judged."""
    points = trend(measured)
    if len(points) < 2:
        return []
    rows, before = [], None
    for place, m in points:
        change = "" if before is None else f"{m['tau'] - before:+.3f}"
        rows.append((place, m["drafter"], f"{m['tau']:.3f} [{m['low']:.3f}, {m['high']:.3f}]", change))
        before = m["tau"]
    best = max(points, key=lambda point: point[1]["tau"])[1]
    return [
        *table((points[0][0].partition(" ")[0], "checkpoint", "τ(chain) [low, high]", "change"), rows, right={3}),
        f"  best: {best['drafter']}",
    ]


def trend(measured: Sequence[Record], verifier: str = "chain") -> list[tuple[str, Record]]:
    """Candidates in the order of their training: by the last number in each name ("step 2000"), if all have one and
    no two the same; else in the order in which they were given ("order 1").
    """
    own = [m for m in measured if m["verifier"] == verifier and m["drafter"] != REFERENCE]
    steps = [_step(m["drafter"]) for m in own]
    if None not in steps and len(set(steps)) == len(steps):
        ordered = sorted(zip(steps, own, strict=True), key=lambda point: point[0])
        return [(f"step {step}", m) for step, m in ordered]
    return [(f"order {number}", m) for number, m in enumerate(own, 1)]


def _step(name: str) -> int | None:
    found = re.findall(r"\d+", name)
    return int(found[-1]) if found else None


def _whole(record: Record) -> bool:
    return bool(record.get("profile")) and "histogram" in record["profile"]


def _rate(matched: int, tried: int) -> str:
    return f"{matched / tried:.3f}" if tried else "-"
