"""What the numerics tests found, as plain text: error by layer of each path beside its budget, and the effect on τ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taugate.report.columns import table

Record = Mapping[str, Any]
_KINDS = {"linear_attention": "delta net", "full_attention": "attention"}


def budget_lines(records: Sequence[Record]) -> list[str]:
    """Agreements that have a budget: for each budget the measure that came nearest to it, and of how many."""
    nearest: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        nearest.setdefault(tuple(record[name] for name in ("level", "dtype", "path", "what")), []).append(record)
    rows = []
    for key, group in sorted(nearest.items()):
        worst = max(group, key=lambda r: (not r["ok"], r["value"]))
        unit = "" if worst["unit"] == "relative" else worst["unit"]
        value = f"{worst['value']:.3g}" if worst["ok"] else f"over: {worst['value']:.3g}"
        rows.append((*key, value, f"{worst['limit']:.3g}", unit, str(len(group)), worst["case"]))
    header = ("level", "dtype", "path", "", "worst", "budget", "", "of", "case")
    return table(header, rows, right={4, 5, 7}) if rows else []


def divergence_lines(records: Sequence[Record]) -> list[str]:
    """For each target and precision a table of its layers: errors of every path in roundings to bfloat16 (f).

    mixer and block: the layer alone, fed what the reference fed it; propagated: the path running freely.
    """
    lines: list[str] = []
    for (target, dtype), group in grouped(records).items():
        paths = [record["path"] for record in group]
        header = ["layer", "", *(f"{path} {what}" for what in ("mixer", "block", "propagated") for path in paths)]
        rows = [
            [str(layer), _KINDS.get(kind, kind), *_cells(group, layer)] for layer, kind in enumerate(group[0]["kinds"])
        ]
        budgets = [
            *(_limit(r, "mixer") for r in group), *(_limit(r, "block") for r in group),
            *(_limit(r, "propagated") for r in group),
        ]  # fmt: skip
        if any(budgets):
            rows.append(["budget", "", *budgets])
        end = [_number(record["final_hidden"]) for record in group]
        rows.append(["final", "hidden", *("" for _ in range(2 * len(paths))), *end])
        title = f"{target}, {dtype}: relative error against float64 in f = 1.66e-3, {group[0]['tokens']} tokens"
        lines += ["", title] if lines else [title]
        lines += [f"  {line}" for line in table(header, rows, right=range(2, len(header)))]
        for record in group:
            if record.get("top"):
                lines.append(f"  {record['path']}: {_logits(record)}")
    return lines


def effect_lines(records: Sequence[Record]) -> list[str]:
    """Δτ [low, high] of states from each source against those of the PyTorch fallback."""
    if not records:
        return []
    rows = [
        (
            record["drafter"], record["verifier"], f"{record['states']} − {record['baseline']}",
            f"{record['tau']:.3f} − {record['baseline_tau']:.3f}",
            f"{record['difference']:+.3f} [{record['low']:+.3f}, {record['high']:+.3f}]", str(record["prompts"]),
        )
        for record in records
    ]  # fmt: skip
    header = ("drafter", "verifier", "states", "τ", "Δτ [low, high]", "prompts")
    first = records[0]
    title = f"effect of the kernel path on τ, {first['target']} in {first['dtype']}, paired by prompt"
    return [title, *(f"  {line}" for line in table(header, rows, right={5}))]


def grouped(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Divergences by target and precision; of a path that was measured twice, the one with more tokens."""
    groups: dict[tuple[str, str], dict[str, Record]] = {}
    for record in sorted(records, key=lambda record: record["tokens"]):
        groups.setdefault((record["target"], record["dtype"]), {})[record["path"]] = record
    return {key: list(paths.values()) for key, paths in groups.items()}


def _cells(group: Sequence[Record], layer: int) -> list[str]:
    return [_number(record[what][layer]) for what in ("mixer", "block", "propagated") for record in group]


def _limit(record: Record, what: str) -> str:
    limit = record.get("limits", {}).get(what)
    return "" if limit is None else _number(limit)


def _number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1e}"


def _logits(record: Record) -> str:
    top = record["top"]
    return (
        f"KL {record['kl']:.2g} nats, same argmax {top['same']:.2%}, "
        f"{top['flips']} flips among {top['decided']} tokens that are decided beyond the noise"
    )
