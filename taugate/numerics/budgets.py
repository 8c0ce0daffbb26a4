"""How far a path may be off: budgets from gate.toml, each with its unit, reason and date, and the verdict on a measure.

A budget is about one path against the float64 reference, never about two paths against each other: that two paths
agree within x proves neither right, and that they differ proves neither wrong. The one comparison between paths is
the ratio of their errors against that same reference (unit "ratio").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taugate.errors import ConfigError, EvidenceError
from taugate.numerics.measures import ROUNDING

if TYPE_CHECKING:
    from taugate.config_schema import BudgetRule

UNITS = {
    "f": f"roundings to bfloat16, relative error / {ROUNDING:g}",
    "relative": "relative Frobenius error against the float64 reference",
    "ratio": "this path's error over that of the path it is compared with, both against the float64 reference",
    "nats": "mean KL divergence of the next-token distribution",
    "share": "share of tokens",
}


@dataclass(frozen=True)
class Budget:
    """One limit: `what` (output, state, token, …) of `path` at `level` in `dtype` must not exceed `limit` `unit`s."""

    level: str
    what: str
    dtype: str
    path: str
    limit: float
    unit: str
    reason: str
    date: str

    def __str__(self) -> str:
        return f"{self.level} {self.what} {self.dtype} {self.path}"


@dataclass(frozen=True)
class Agreement:
    """A measure beside its budget. `ok` is false for a value that is not a number."""

    budget: Budget
    value: float
    case: str
    index: int | None = None

    @property
    def ok(self) -> bool:
        return self.value <= self.budget.limit

    def __str__(self) -> str:
        where = f" of {self.case}" if self.case else ""
        at = "" if self.index is None else f", worst at index {self.index}"
        b = self.budget
        return f"{b}{where}: {self.value:.3g} {b.unit}, budget {b.limit:g} {b.unit}{at} ({b.reason}, {b.date})"

    def record(self) -> dict[str, Any]:
        """As an evidence record of type "agreement"."""
        b = self.budget
        return {
            "type": "agreement",
            "level": b.level,
            "what": b.what,
            "dtype": b.dtype,
            "path": b.path,
            "value": self.value,
            "limit": b.limit,
            "unit": b.unit,
            "case": self.case,
            "ok": self.ok,
        } | ({} if self.index is None else {"index": self.index})


class Budgets:
    """All budgets of a configuration, found by level, quantity, dtype and path."""

    def __init__(self, rules: Mapping[str, BudgetRule]) -> None:
        """rules: gate_config.numerics.budget. Raises ConfigError when two tables set the same limit."""
        self._all: dict[tuple[str, str, str, str], Budget] = {}
        for name, rule in rules.items():
            for what, limit in rule.limits.items():
                key = (rule.level, what, rule.dtype, rule.path)
                if key in self._all:
                    raise ConfigError(f"numerics.budget.{name} sets {' '.join(key)} a second time")
                self._all[key] = Budget(*key, limit, rule.unit, rule.reason, rule.date.isoformat())

    def __iter__(self) -> Iterator[Budget]:
        return iter(self._all.values())

    def find(self, level: str, what: str, dtype: str, path: str) -> Budget:
        """The budget, or ConfigError: what has no budget cannot be judged, and must not look as if it had passed."""
        try:
            return self._all[level, what, dtype, path]
        except KeyError:
            raise ConfigError(
                f"gate.toml has no numerics budget for {what} of {path} in {dtype} at level {level}; "
                f"add it to a [numerics.budget.NAME] table with a reason and a date"
            ) from None


def check(measure: float, budget: Budget, case: str = "", index: int | None = None) -> Agreement:
    """A relative error (or ratio, nats, share) beside its budget; errors in unit "f" are converted from relative.

    Raises EvidenceError for a negative measure or one that is not a number: that is no agreement, but no measure.
    """
    if math.isnan(measure) or measure < 0:
        raise EvidenceError(f"{budget}: {measure} is not a measure")
    return Agreement(budget, measure / ROUNDING if budget.unit == "f" else measure, case, index)
