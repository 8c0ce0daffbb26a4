"""The levels of a model beside their budgets."""

from __future__ import annotations

from collections.abc import Sequence

from taugate.errors import EvidenceError
from taugate.numerics.budgets import Agreement, Budgets, check
from taugate.numerics.measures import ROUNDING, error_ratio
from taugate.target.levels import Divergence


def judge(found: Divergence, budgets: Budgets, case: str, propagated: bool = True) -> list[Agreement]:
    """The absolute budgets of a path: its layers alone, and with `propagated` what piles up and what is left of it in
    the logits. The latter depends on the model: those budgets are of the models that taugate ships and draws.

    Raises ConfigError for a budget that is not there.
    """

    def at(level: str, what: str, value: float, index: int | None = None, where: str = "") -> Agreement:
        return check(value, budgets.find(level, what, found.dtype, found.path), case + where, index)

    agreements = [
        at("layer", "mixer", *_worst(found.mixer)),
        at("layer", "block", *_worst(found.block)),
        at("layer", "mixer token", found.token.error, found.token.index, f", layer {found.token_layer}"),
    ]
    if propagated:
        agreements += [
            at("propagated", "output", *_worst(found.propagated)),
            at("propagated", "final_hidden", found.final_hidden),
        ]
    if propagated and found.kl is not None and found.top is not None:
        agreements += [
            at("logits", "kl", found.kl),
            at("logits", "flips", found.top.flips / max(found.top.decided, 1)),
        ]
    return agreements


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


def limits(found: Divergence, budgets: Budgets) -> dict[str, float]:
    """Absolute limits of the errors by layer in roundings to bfloat16, for plots."""
    limit = {}
    for name, level, what in (("mixer", "layer", "mixer"), ("propagated", "propagated", "output")):
        budget = budgets.find(level, what, found.dtype, found.path)
        limit[name] = budget.limit if budget.unit == "f" else budget.limit / ROUNDING
    return limit


def _worst(errors: Sequence[float]) -> tuple[float, int]:
    index = max(range(len(errors)), key=errors.__getitem__)
    return errors[index], index
