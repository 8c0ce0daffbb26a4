"""One self-contained page: verdicts first, then τ with plots, the timeline of the window, and the provenance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from taugate.report import drafter_plots, plots
from taugate.report.drafters import calibration_lines, profile_lines, trend, trend_lines
from taugate.report.numerics import divergence_lines, effect_lines, grouped
from taugate.report.table import agreement_lines, measurement_lines, window_lines

Record = Mapping[str, Any]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
pre { background: #f6f6f4; padding: .8rem; overflow-x: auto; font-size: 12.5px; }
table { border-collapse: collapse; } td, th { padding: .25rem .8rem .25rem 0; vertical-align: top; text-align: left; }
.pass { color: #1b6e2e; } .fail, .broken { color: #b00020; } .inconclusive { color: #9a6700; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } svg { max-width: 100%; height: auto; }
"""


def render_page(records: Iterable[Record], thresholds: Mapping[str, float]) -> str:
    """HTML of a run's evidence records. thresholds: min_tau by verifier, drawn into the plot."""
    records = list(records)
    measured = [r for r in records if r["type"] == "measurement"]
    parts = [
        _verdicts([r for r in records if r["type"] == "verdict"]),
        _numbers(measured, thresholds),
        _numerics(records),
        *(_window(r) for r in records if r["type"] == "window"),
        *(_provenance(r) for r in records if r["type"] == "provenance"),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>taugate</title><style>{_STYLE}</style>'
        f"</head><body>\n<h1>taugate</h1>\n{body}\n</body></html>\n"
    )


def _verdicts(verdicts: Sequence[Record]) -> str:
    rows = "".join(
        f'<tr><td class="{escape(v["outcome"])}"><b>{escape(v["outcome"].upper())}</b></td>'
        f"<td>{escape(v['gate'])}</td><td>{escape(v['sentence'])}</td></tr>"
        for v in verdicts
    )
    return f"<h2>Verdicts</h2><table>{rows}</table>" if rows else "<h2>Verdicts</h2><p>None: nothing was decided.</p>"


def _numbers(measured: Sequence[Record], thresholds: Mapping[str, float]) -> str:
    if not measured:
        return ""
    chains = [m for m in measured if m["verifier"] == "chain"]
    drawn = [plots.tau_by_verifier(measured, thresholds)]
    if profiled := [m for m in chains if m.get("profile")]:
        drawn.append(plots.acceptance_by_slot(profiled))
    reference = next((m for m in chains if m["drafter"] == "reference"), None)
    if reference:
        drawn += [plots.tau_by_prompt(m, reference) for m in chains if m is not reference]
    if whole := [m for m in chains if "histogram" in (m.get("profile") or {})]:
        drawn.append(drafter_plots.tokens_by_cycle(whole))
    if expecting := [m for m in measured if (m.get("profile") or {}).get("predicted") is not None]:
        drawn.append(drafter_plots.expected_beside_emitted(expecting))
    if len(trend(measured)) > 1:
        drawn.append(drafter_plots.tau_over_checkpoints(measured, thresholds))
    parts = [lines(measured) for lines in (measurement_lines, profile_lines, calibration_lines, trend_lines)]
    table = escape("\n\n".join("\n".join(part) for part in parts if part))
    return f'<h2>τ</h2><div class="plots">{"".join(drawn)}</div><pre>{table}</pre>'


def _numerics(records: Sequence[Record]) -> str:
    """Error by layer of each path with its budget, what it does to τ, and every agreement."""
    by_type = {kind: [r for r in records if r["type"] == kind] for kind in ("divergence", "effect", "agreement")}
    divergences, effects, agreements = by_type.values()
    if not divergences and not effects:
        return ""
    drawn = [
        plots.error_by_layer(group, what) for group in grouped(divergences).values() for what in ("mixer", "propagated")
    ]
    lines = [*divergence_lines(divergences), "", *effect_lines(effects), "", *agreement_lines(agreements)]
    table = escape("\n".join(lines))
    return f'<h2>Numerics</h2><div class="plots">{"".join(drawn)}</div><pre>{table}</pre>'


def _window(record: Record) -> str:
    outcome = escape(str(record["outcome"]))
    return f'<h2>Window</h2><p class="{outcome}">{outcome}</p><pre>{escape(chr(10).join(window_lines(record)))}</pre>'


def _provenance(record: Record) -> str:
    hidden = {"type", "schema_version", "run", "at"}
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in record.items()
        if name not in hidden
    )
    return f"<h2>Provenance</h2><table>{rows}</table>"
