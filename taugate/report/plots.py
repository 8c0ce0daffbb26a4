"""Plots of a run as SVG text. matplotlib is imported only when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
_COLOURS = ("#1f6f8b", "#d1702f", "#5b8c3a", "#8a4f9e", "#8c8c8c")


def tau_by_verifier(measurements: Sequence[Record], thresholds: Mapping[str, float]) -> str:
    """τ with its interval for each drafter and verifier; thresholds as dashed lines where they apply."""
    drafters = list(dict.fromkeys(m["drafter"] for m in measurements))
    verifiers = list(dict.fromkeys(m["verifier"] for m in measurements))
    figure, axes = _axes(7.2, 3.2)
    for number, drafter in enumerate(drafters):
        own = {m["verifier"]: m for m in measurements if m["drafter"] == drafter}
        places = [verifiers.index(v) + (number - (len(drafters) - 1) / 2) * 0.16 for v in own]
        errors = [[m["tau"] - m["low"] for m in own.values()], [m["high"] - m["tau"] for m in own.values()]]
        taus = [m["tau"] for m in own.values()]
        axes.errorbar(places, taus, yerr=errors, fmt="o", capsize=4, color=_colour(number), label=drafter)
    for verifier, value in thresholds.items():
        if verifier in verifiers:
            place = verifiers.index(verifier)
            ends = (place - 0.4, place + 0.4)
            axes.hlines(value, *ends, colors="#b00020", linestyles="dashed", label=f"min_tau {value:g}")
    axes.set_xticks(range(len(verifiers)), verifiers)
    axes.set_ylabel("τ, tokens per cycle")
    axes.legend(fontsize=8)
    return _svg(figure)


def tau_by_prompt(candidate: Record, reference: Record) -> str:
    """One point per prompt: τ of the reference against τ of the candidate; on the line they are equal."""
    figure, axes = _axes(3.8, 3.6)
    ours = {p["prompt_id"]: p["tokens"] / p["cycles"] for p in candidate["per_prompt"]}
    theirs = {p["prompt_id"]: p["tokens"] / p["cycles"] for p in reference["per_prompt"]}
    shared = sorted(ours.keys() & theirs.keys())
    axes.scatter([theirs[i] for i in shared], [ours[i] for i in shared], s=14, color=_colour(0))
    limit = max([*ours.values(), *theirs.values(), 2.0]) * 1.05
    axes.plot([1, limit], [1, limit], color="#999999", linewidth=1)
    axes.set_xlabel(f"τ of {reference['drafter']}")
    axes.set_ylabel(f"τ of {candidate['drafter']}")
    return _svg(figure)


def acceptance_by_slot(measurements: Sequence[Record]) -> str:
    """P(slot k is accepted | all slots before it were), for the chain of each drafter."""
    figure, axes = _axes(4.6, 3.6)
    for number, measurement in enumerate(measurements):
        seen = measurement["profile"]
        slots = [k for k, tried in enumerate(seen["tried"], 1) if tried]
        rates = [seen["matched"][k - 1] / seen["tried"][k - 1] for k in slots]
        axes.plot(slots, rates, marker="o", color=_colour(number), label=measurement["drafter"])
    axes.set_xlabel("slot of the block")
    axes.set_ylabel("conditional acceptance")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    return _svg(figure)


def error_by_layer(divergences: Sequence[Record], what: str) -> str:
    """Error of each path at every layer in roundings to bfloat16, with its budget dashed.

    what: "mixer" or "block" (a layer alone), or "propagated" (the path running freely). Records of one target and
    precision.
    """
    figure, axes = _axes(4.6, 3.2)
    for number, record in enumerate(divergences):
        layers = range(len(record[what]))
        axes.plot(layers, record[what], marker="o", markersize=3, color=_colour(number), label=record["path"])
        if limit := record["limits"].get(what):
            label = f"budget of {record['path']}"
            axes.axhline(limit, color=_colour(number), linestyle="dashed", linewidth=1, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("layer")
    axes.set_ylabel("error against float64, f")
    axes.set_title(f"{what}, {divergences[0]['target']}, {divergences[0]['dtype']}", fontsize=9)
    axes.legend(fontsize=8)
    return _svg(figure)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _axes(width: float, height: float) -> tuple[Any, Any]:
    """A figure that no window system knows of."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.25)
    return figure, axes


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
