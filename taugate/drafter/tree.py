"""The draft tree of DDTree: best-first over the slot marginals (Ringel & Romano, arXiv 2604.12989, algorithm
1).

A drafter's pass gives one distribution per slot. A node at depth d is a choice of one token for each of the
slots 1…d, written as the tuple of those tokens' ranks; its score is the sum of their log-probabilities. The
heap of the published implementation pops nodes by descending score, equal scores by ascending rank tuple, and
the tree of N nodes (root excluded) is the first N pops. So trees are nested, and a true continuation is
accepted to the depth at which its own prefix is popped within N. No heap is needed for that: the pop number
of a node is one more than the number of nodes that precede it, and those are counted, level by level, for
many trees at once.

Scores are integers (log-probabilities in units of 2^-32), so that sums are exact and ties are ties.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

UNIT = 2.0**-32
LOWEST = 2**43  # of one slot, in units: a log-probability of -2048, below anything a softmax tells apart
ABSENT = 1 - 2**44  # score in a slot that a cut block does not have; no node reaches it


def scores(logprobs: Array, slots: Array | None = None) -> Array:
    """Integer scores [R, L, K] of log-probabilities [R, L, K] (float64, descending along K).

    slots [R]: how many of the L slots each row's block really drafts; the others hold no nodes.
    """
    out = np.rint(np.maximum(logprobs, -LOWEST * UNIT) / UNIT).astype(np.int64)
    if slots is not None:
        out[np.arange(out.shape[1]) >= slots[:, None]] = ABSENT
    return out


def expected_depth(logprobs: Array, budgets: list[int], slots: Array | None = None) -> Array:
    """Σ q(u) over the nodes u of each budget's tree: the accepted depth that the drafter itself predicts.

    logprobs: see `scores`; a drafter whose marginals were the truth would have τ = 1 + this. Returns [R,
    budgets].
    """
    limit = max(budgets)
    together = np.array(pairs(limit))
    last = np.zeros((len(logprobs), 1))
    levels = []
    for level in range(logprobs.shape[1]):
        here = logprobs[:, level]
        usable = together[(together[:, 0] < last.shape[1]) & (together[:, 1] < here.shape[1])]
        last = best(last[:, usable[:, 0]] + here[:, usable[:, 1]], limit)
        if slots is not None:
            last = np.where((level < slots)[:, None], last, -np.inf)
        levels.append(last)
    chance = np.exp(best(np.concatenate(levels, 1), limit)).cumsum(1)
    return chance[:, np.minimum(np.array(budgets), chance.shape[1]) - 1]


@cache
def pairs(limit: int) -> list[tuple[int, int]]:
    """Where the largest `limit` of the sums of two descending lists are: all (i, j) with (i + 1)(j + 1) ≤ limit."""
    return [(i, j) for i in range(limit) for j in range(limit // (i + 1))]


def best(values: Array, count: int) -> Array:
    """The `count` largest along the last axis (or all, if fewer), descending."""
    size = values.shape[-1]
    if count < size:
        values = np.partition(values, size - count, axis=-1)[..., size - count :]
    return np.sort(values, axis=-1)[..., ::-1]
