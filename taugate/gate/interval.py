"""How sure a τ is: intervals and what could be seen at all, clustered by prompt.

Cycles of one prompt are not independent, so prompts are the unit: a per-cycle standard error covers a third
of what it promises. τ is a ratio of sums, Σ tokens / Σ cycles, and is resampled and linearised as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Column = Sequence[int]


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn. draws: resamples; tail: share outside on each side; seed: of the generator."""

    draws: int = 2000
    tail: float = 0.05
    seed: int = 0


def interval(tokens: Column, cycles: Column, block_size: int, bootstrap: Bootstrap) -> tuple[float, float]:
    """Percentile interval of Σtokens / Σcycles over resampled prompts.

    One prompt says nothing about others, so its interval is everything that τ can be: 1…block size.
    """
    if len(tokens) < 2:
        return 1.0, float(block_size)
    return resample((tokens, cycles), lambda t, c: t / c, bootstrap)


def resample(columns: Sequence[Column], statistic: Any, how: Bootstrap) -> tuple[float, float]:
    """Percentile bootstrap of a statistic of column sums, resampling rows (prompts) together."""
    import numpy as np
    from scipy.stats import bootstrap

    def of_sums(*samples: Any, axis: int = -1) -> Any:
        return statistic(*(sample.sum(axis=axis) for sample in samples))

    drawn = bootstrap(
        tuple(np.asarray(column, dtype=float) for column in columns),
        of_sums,
        paired=True,
        vectorized=True,
        n_resamples=how.draws,
        confidence_level=1 - 2 * how.tail,
        method="percentile",
        rng=np.random.default_rng(how.seed),
    ).confidence_interval
    return float(drawn.low), float(drawn.high)


def detectable(
    tokens: Column, cycles: Column, how: Bootstrap, minus: tuple[Column, Column] | None = None
) -> float | None:
    """The smallest true difference that this many prompts show 4 times in 5, at the interval's tail
    probability.

    Of τ against a threshold, or with `minus` (another drafter's tokens and cycles on the same prompts, in the
    same order) of the paired difference. (z_tail + z_0.8) standard errors of the linearised ratio. None below
    2 prompts.
    """
    import numpy as np
    from scipy.stats import norm

    if len(tokens) < 2:
        return None
    residual = _influence(tokens, cycles)
    if minus is not None:
        residual = residual - _influence(*minus)
    error = np.sqrt(len(tokens) / (len(tokens) - 1) * (residual**2).sum())
    return float((norm.isf(how.tail) + norm.ppf(0.8)) * error)


def _influence(tokens: Column, cycles: Column) -> Any:
    """How much each prompt moves Σtokens / Σcycles, to first order."""
    import numpy as np

    t, c = np.asarray(tokens, dtype=float), np.asarray(cycles, dtype=float)
    return (t - t.sum() / c.sum() * c) / c.sum()
