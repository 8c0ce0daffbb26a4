"""The levels of a model beside their budgets."""

from __future__ import annotations

from collections.abc import Sequence

from taugate.errors import EvidenceError
from taugate.numerics.budgets import Agreement, Budgets, check
from taugate.numerics.measures import ROUNDING, error_ratio
from taugate.target.levels import Comparison, Divergence

LEVELS = ("layer", "propagated", "logits")


def judge(found: Comparison, budgets: Budgets, case: str, levels: Sequence[str] = LEVELS) -> list[Agreement]:
    """Every measure of the levels beside its budget.

    What piles up depends on the model: the budgets of "propagated" and "logits" are of the models that taugate ships
    and draws. Raises ConfigError for a budget that is not there.
    """
    return [agreement for level in levels for agreement in judge_level(found, level, budgets, case)]


def judge_level(found: Comparison, level: str, budgets: Budgets, case: str) -> list[Agreement]:
    """As `judge`, of one level."""

    def at(what: str, value: float, index: int | None = None) -> Agreement:
        return check(value, budgets.find(level, what, found.dtype, found.path), case, index)

    if level == "layer":
        return [at(what, *_worst(found.errors(what))) for what in ("mixer", "block")]
    if level == "propagated":
        return [at("output", *_worst(found.errors("propagated"))), at("final_hidden", found.errors("final")[0])]
    logits = found.logits()
    if not logits:
        raise EvidenceError(f"{case}: path {found.path} gave no logits")
    return [at("kl", logits["kl"]), at("flips", logits["top"].flips / max(logits["top"].decided, 1))]


def judge_ratio(found: Divergence, baseline: Divergence, budgets: Budgets, case: str) -> list[Agreement]:
    """The budgets of any model: the path's error over that of `baseline`, both against the reference, at the worst
    layer.

    Raises EvidenceError unless both ran on the same.
    """
    if (found.kinds, found.tokens, found.dtype) != (baseline.kinds, baseline.tokens, baseline.dtype):
        raise EvidenceError(f"{found.path} and {baseline.path} were not run on the same layers, tokens and precision")
    path = f"{found.path}/{baseline.path}"
    return [
        check(value, budgets.find(level, what, found.dtype, path), case, index)
        for level, what, ours, theirs in (
            ("layer", "mixer", found.mixer, baseline.mixer),
            ("propagated", "output", found.propagated, baseline.propagated),
        )
        for value, index in [_worst([error_ratio(a, b) for a, b in zip(ours, theirs, strict=True)])]
    ]


def limits(dtype: str, path: str, budgets: Budgets) -> dict[str, float]:
    """Absolute limits of the errors by layer in roundings to bfloat16, for tables and plots."""
    limit = {}
    for name, level, what in (
        ("mixer", "layer", "mixer"), ("block", "layer", "block"), ("propagated", "propagated", "output"),
    ):  # fmt: skip
        budget = budgets.find(level, what, dtype, path)
        limit[name] = budget.limit if budget.unit == "f" else budget.limit / ROUNDING
    return limit


def _worst(errors: Sequence[float]) -> tuple[float, int]:
    index = max(range(len(errors)), key=errors.__getitem__)
    return errors[index], index
