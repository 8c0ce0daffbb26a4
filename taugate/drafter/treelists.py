"""The best tokens of each slot of many blocks, as far as their trees may need them, in one sorted array.

How many that are differs: a slot whose best token is almost certain offers few nodes, and so does one that is reached
by nothing probable. So what is listed is bounded by the score of a whole node, not by a number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from taugate.drafter.tree import ABSENT, LOWEST, UNIT

Array = np.ndarray[Any, Any]

ROW = 2**44  # distance of two slots' keys: more than any score
COMPLETE = -(2**60)  # floor of a slot of which everything is listed


@dataclass(frozen=True)
class Lists:
    """R blocks of L slots; slot l of block r is row r · L + l.

    keys [n] int64, ascending: row · ROW - score, of every listed token. begin [R · L + 1]: where each row's keys begin.
    floor [R, L]: every token with a score above it is listed (scores: see `tree`).
    """

    keys: Array
    begin: Array
    floor: Array

    @cached_property
    def best(self) -> Array:
        """Highest score of each slot, [R, L]; the lowest there is where nothing is listed."""
        rows = np.arange(self.floor.size)
        first = np.append(self.keys, 0)[self.begin[:-1]]
        return np.where(np.diff(self.begin) > 0, rows * ROW - first, -LOWEST).reshape(self.floor.shape)

    @cached_property
    def ahead(self) -> Array:
        """Score of the best node that ends right before each slot, [R, L]."""
        return self.best.cumsum(1) - self.best

    @cached_property
    def horizon(self) -> Array:
        """[R]: all nodes of a block with a score above it consist of listed tokens."""
        return (self.floor + self.ahead).max(1)

    @classmethod
    def gather(cls, logits: Array, row: Array, total: Array, least: Array) -> Lists:
        """All tokens with a logit of at least `least` [R, L] fp32, which is inf where nothing is asked.

        logits [n] fp32 and row [n] of each, in any order; total [R · L] fp32: log Σ exp of each row.
        """
        keys = row * ROW - integers(logits, total[row])
        keys.sort()
        # A token that is left out has a smaller logit, and rounding keeps order.
        total = total.reshape(least.shape)
        floor = np.where(np.isinf(least), COMPLETE, integers(np.where(np.isinf(least), total, least), total))
        return cls(keys, _begin(row, least.size), floor)

    @classmethod
    def of(cls, score: Array, complete: bool) -> Lists:
        """From scores [R, L, K], descending along K; complete: the vocabulary has no more than K tokens."""
        listed = score != ABSENT
        row = np.flatnonzero(listed) // score.shape[2]
        floor = np.where(listed[..., -1] & (not complete), score[..., -1], COMPLETE)
        return cls(row * ROW - score[listed], _begin(row, floor.size), floor)

    @classmethod
    def together(cls, parts: Sequence[Lists]) -> Lists:
        """The blocks of all parts, in order."""
        begin = np.cumsum([0, *(part.floor.size for part in parts)])
        keys = [part.keys + ROW * first for part, first in zip(parts, begin, strict=False)]
        lengths = np.concatenate([np.diff(part.begin) for part in parts])
        floor = np.concatenate([part.floor for part in parts])
        return cls(np.concatenate(keys), np.append(0, lengths.cumsum()), floor)

    def before(self, row: Array, bound: Array) -> Array:
        """How many tokens of each `row` have a score above -`bound`, which is no less than -ROW / 2."""
        return np.searchsorted(self.keys, row * ROW + np.minimum(bound, ROW // 2 + 1)) - self.begin[row]

    def places(self, row: Array, score: Array) -> tuple[Array, Array]:
        """How many tokens of each `row` come before those of a listed score; and whether there is only one of these."""
        key = row * ROW - score
        first = np.searchsorted(self.keys, key)
        after = np.append(self.keys, -1)[first + 1]  # keys are never negative
        return first - self.begin[row], after != key


def integers(logits: Array, total: Array) -> Array:
    """Scores (see `tree`) of logits, given log Σ exp."""
    logprobs = logits.astype(np.float64) - total
    return np.rint(np.maximum(logprobs, -LOWEST * UNIT) * (1 / UNIT)).astype(np.int64)


def _begin(row: Array, rows: int) -> Array:
    return np.append(0, np.bincount(row, minlength=rows).cumsum())
