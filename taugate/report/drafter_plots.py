"""Plots of what lies behind a τ, and of τ over checkpoints, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taugate.report.drafters import REFERENCE, trend
from taugate.report.plots import _axes, _colour, _svg

Record = Mapping[str, Any]


def tokens_by_cycle(measured: Sequence[Record]) -> str:
    """Share of the cycles of each chain that emitted 1, 2, … tokens."""
    figure, axes = _axes(4.6, 3.6)
    width = 0.8 / len(measured)
    for number, m in enumerate(measured):
        counts = m["profile"]["histogram"]
        places = [n + (number - (len(measured) - 1) / 2) * width for n in range(1, len(counts) + 1)]
        shares = [count / max(sum(counts), 1) for count in counts]
        axes.bar(places, shares, width, color=_colour(number), label=m["drafter"])
    axes.set_xlabel("tokens that a cycle emitted")
    axes.set_ylabel("share of cycles")
    axes.legend(fontsize=8)
    return _svg(figure)


def expected_beside_emitted(measured: Sequence[Record]) -> str:
    """1 + Σ q of each tree, which a calibrated drafter meets, against what its cycles emitted."""
    figure, axes = _axes(3.8, 3.6)
    drafters = list(dict.fromkeys(m["drafter"] for m in measured))
    for number, drafter in enumerate(drafters):
        own = [m for m in measured if m["drafter"] == drafter]
        places = [m["profile"]["predicted"] for m in own]
        axes.plot(places, [m["profile"]["realised"] for m in own], "o", color=_colour(number), label=drafter)
        for m, place in zip(own, places, strict=True):
            axes.annotate(m["verifier"], (place, m["profile"]["realised"]), fontsize=7, xytext=(4, 2),
                          textcoords="offset points")  # fmt: skip
    limits = [m["profile"][which] for m in measured for which in ("predicted", "realised")]
    axes.plot([min(limits), max(limits)], [min(limits), max(limits)], color="#999999", linewidth=1)
    axes.set_xlabel("1 + Σ q, expected by the drafter")
    axes.set_ylabel("tokens emitted per cycle")
    axes.legend(fontsize=8)
    return _svg(figure)


def tau_over_checkpoints(measured: Sequence[Record], thresholds: Mapping[str, float]) -> str:
    """τ with its interval of each candidate in the order of training, by verifier; the reference as a line."""
    figure, axes = _axes(7.2, 3.2)
    verifiers = list(dict.fromkeys(m["verifier"] for m in measured))
    for number, verifier in enumerate(verifiers):
        points = trend(measured, verifier)
        kind, steps = points[0][0].partition(" ")[0], [int(place.partition(" ")[2]) for place, _ in points]
        own = [m for _, m in points]
        errors = [[m["tau"] - m["low"] for m in own], [m["high"] - m["tau"] for m in own]]
        taus = [m["tau"] for m in own]
        axes.errorbar(steps, taus, yerr=errors, fmt="o-", capsize=3, color=_colour(number), label=verifier)
        for m in measured:
            if m["drafter"] == REFERENCE and m["verifier"] == verifier:
                axes.axhline(m["tau"], color=_colour(number), linewidth=1, linestyle="dotted")
        if verifier in thresholds:
            axes.axhline(thresholds[verifier], color="#b00020", linewidth=1, linestyle="dashed")
        axes.set_xlabel("training step" if kind == "step" else "checkpoint, in the order given")
        axes.set_xticks(steps)
    axes.set_ylabel("τ (dotted: reference)")
    axes.legend(fontsize=8)
    return _svg(figure)
