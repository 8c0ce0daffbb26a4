"""The result of a run as plain text: the window's timeline, τ with interval and definition, verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from taugate.report.columns import table
from taugate.report.drafters import calibration_lines, profile_lines, trend_lines
from taugate.report.numerics import budget_lines, divergence_lines, effect_lines

Record = Mapping[str, Any]


def render(records: Iterable[Record]) -> list[str]:
    """Lines without colours for all records of a run; types that a person need not see are left out."""
    records = list(records)
    parts = [
        *(window_lines(record) for record in _of(records, "window")),
        plan_lines(_of(records, "plan")),
        agreement_lines(_of(records, "agreement")),
        divergence_lines(_of(records, "divergence")),
        effect_lines(_of(records, "effect")),
        measurement_lines(_of(records, "measurement")),
        *(lines(_of(records, "measurement")) for lines in (profile_lines, calibration_lines, trend_lines)),
        verdict_lines(_of(records, "verdict")),
    ]
    lines: list[str] = []
    for part in filter(None, parts):
        lines += ["", *part] if lines else part
    return lines


def window_lines(record: Record) -> list[str]:
    """One window: its outcome, when each phase began and how long it took, and what was out of the ordinary."""
    outcome = str(record["outcome"])
    if outcome == "not needed":
        return [f"window: not needed{_because(record)}"]
    down = record.get("downtime_s")
    head = f"window {record.get('window_id', '')}".rstrip() + f": {outcome}{_because(record)}"
    head += f", server down for {down:.1f} s" if isinstance(down, (int, float)) else ""
    phases = list(record.get("phases", ()))
    begun = [phase.get("seconds") for phase in phases]
    rows = [
        (
            phase["phase"],
            _clock(phase.get("at_iso") or phase.get("at", "")),
            _number(phase.get("seconds"), ".1f"),
            _number(end - start if None not in (start, end) else None, ".1f"),
            phase.get("detail", ""),
        )
        for phase, start, end in zip(phases, begun, [*begun[1:], None], strict=False)
    ]
    timeline = table(("phase", "at", "seconds", "took", "detail"), rows, right={2, 3}) if rows else []
    return [head, *_indent([*timeline, *_remarks(record)])]


def _remarks(record: Record) -> list[str]:
    """What a reader of a window's timeline should know beside it: force, differences, losses, troubles."""
    lines = [*record.get("escalations", ()), *record.get("notes", ())]
    canary, fingerprint = record.get("canary") or {}, record.get("fingerprint") or {}
    if canary.get("same") is False:
        first, margin = canary.get("first_difference"), _number(canary.get("top2_margin"), ".3g")
        lines.append(f"canary: other tokens from number {first} on, top-2 margin there {margin}")
    lines += [f"changed: {line}" for line in fingerprint.get("differ", ())]
    if fingerprint:
        lines.append(f"{fingerprint['fields']} fields of the server compared, {len(fingerprint['differ'])} changed")
    lines += [record["lease_lost"]] if record.get("lease_lost") else []
    return lines


def measurement_lines(records: Sequence[Record]) -> list[str]:
    """τ [low, high] of each drafter and verifier, and below the table what each verifier means."""
    if not records:
        return []
    rows = [
        (
            record["drafter"],
            record["verifier"],
            f"{_number(record['tau'], '.3f')} [{_number(record.get('low'), '.3f')}, "
            f"{_number(record.get('high'), '.3f')}]",
            _number(record.get("tau_macro"), ".3f"),
            _number(record.get("tau_anchors"), ".3f"),
            _number(record.get("tokens"), "d"),
            _number(record.get("cycles"), "d"),
            _number(record.get("prompts"), "d"),
        )
        for record in records
    ]
    header = (
        "drafter",
        "verifier",
        "τ [low, high]",
        "tau_macro",
        "tau_anchors",
        "tokens",
        "cycles",
        "prompts",
    )
    lines = table(header, rows, right={3, 4, 5, 6, 7})
    definitions = {record["verifier"]: record["definition"] for record in records if record.get("definition")}
    return lines + [f"  {verifier}: {text}" for verifier, text in definitions.items()]


def verdict_lines(records: Sequence[Record]) -> list[str]:
    """One line per gate: PASS, FAIL or INCONCLUSIVE, the gate, and the sentence that explains it."""
    rows = [(str(r["outcome"]).upper(), str(r.get("gate", "")), str(r.get("sentence", ""))) for r in records]
    return table(None, rows)


def agreement_lines(records: Sequence[Record]) -> list[str]:
    """What the numerics tests compared: each budget with the measure that came nearest to it, then everything else."""
    rows = []
    for record in records:
        if "limit" in record:
            continue
        rest = {key: value for key, value in record.items() if key not in _BOOKKEEPING and _scalar(value)}
        numbers = " ".join(f"{key}={_number(value, '.4g')}" for key, value in rest.items())
        rows.append((str(record["level"]), numbers))
    return [*budget_lines([r for r in records if "limit" in r]), *(table(("agreement", ""), rows) if rows else [])]


def plan_lines(records: Sequence[Record]) -> list[str]:
    """What a dry run would have done."""
    steps = [str(step) for record in records for step in record.get("steps", ())]
    return ["plan", *_indent(f"{number}. {step}" for number, step in enumerate(steps, 1))] if records else []


_BOOKKEEPING = {"type", "schema_version", "run", "at", "level"}


def _of(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("type") == kind]


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _because(record: Record) -> str:
    return f" ({record['reason']})" if record.get("reason") else ""


def _clock(at: Any) -> str:
    """The time of day of an ISO timestamp, to the tenth of a second."""
    text = str(at)
    return text.partition("T")[2][:10] if "T" in text else text


def _number(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return format(int(value) if form == "d" else float(value), form)


def _scalar(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))
