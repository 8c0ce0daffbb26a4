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

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

UNIT = 2.0**-32
LOWEST = 2**43  # of one slot, in units: a log-probability of -2048, below anything a softmax tells apart
_ROW = 2**44  # distance of two rows' keys in one sorted array
ABSENT = 1 - _ROW  # score in a slot that a cut block does not have; no node reaches it


def scores(logprobs: Array, slots: Array | None = None) -> Array:
    """Integer scores [R, L, K] of log-probabilities [R, L, K] (float64, descending along K).

    slots [R]: how many of the L slots each row's block really drafts; the others hold no nodes.
    """
    out = np.rint(np.maximum(logprobs, -LOWEST * UNIT) / UNIT).astype(np.int64)
    if slots is not None:
        out[np.arange(out.shape[1]) >= slots[:, None]] = ABSENT
    return out


def pop_numbers(score: Array, path: Array, limit: int) -> tuple[Array, Array]:
    """Pop number (1, 2, …) of every prefix of a path in its row's tree, `limit` + 1 where it exceeds `limit`.

    score [R, L, K]: see `scores`; at most 2^18 rows. K ≥ min(limit, V) settles everything.
    path  [R, L]: rank of the true token in each slot (any number from K on if it is beyond the list, but the rank
    itself settles more), negative where the truth has ended.
    Returns int64 [R, L], which ascends along L, because a prefix is popped before what it is a prefix of; and bool
    [R]: rows that touched the end of a list of K < min(limit, V), whose numbers need a longer one.
    """
    width = score.shape[2]
    ranks = np.where(path < 0, limit, path)
    own = np.take_along_axis(score, np.minimum(ranks, width - 1)[..., None], 2)[..., 0].cumsum(1)
    # Every node whose ranks are nowhere larger precedes it: Σ_k Π_{i≤k} (rank_i + 1) nodes, itself included.
    below = np.logical_and.accumulate((ranks + 1.0).cumprod(1).cumsum(1) <= limit, axis=1)
    row, depth = np.nonzero(np.logical_and.accumulate(below & (ranks < width), axis=1))
    count, touched = _preceding(score, path, row, depth, own[row, depth], limit)
    out = np.full(path.shape, limit + 1, dtype=np.int64)
    out[row, depth] = np.minimum(count, limit) + 1
    unknown = np.zeros(len(path), dtype=bool)
    unknown[row[touched & (count <= limit)]] = True
    # A true token beyond the list matters if everything before it is in the tree.
    reached = np.logical_and.accumulate(np.pad(out <= limit, ((0, 0), (1, 0)), constant_values=True)[:, :-1], axis=1)
    return out, unknown | (reached & below & (path >= width)).any(1)


def _preceding(score: Array, path: Array, row: Array, depth: Array, goal: Array, limit: int) -> tuple[Array, Array]:
    """Nodes popped before each (row, depth) of a path (more than `limit` once exceeded), and who touched a list's end.

    The frontier holds the preceding nodes of one level, all trees in one flat array. What precedes is closed under
    taking prefixes, so the next level's are among its children, and as ranks descend in score, they are the first
    few children of each. `order` compares a node's ranks with the path's: -1 before, 0 a prefix of it, 1 after.
    """
    count = np.zeros(len(row), dtype=np.int64)
    touched = np.zeros(len(row), dtype=bool)
    item, total, order = np.arange(len(row)), np.zeros(len(row), dtype=np.int64), np.zeros(len(row), dtype=np.int8)
    offset = np.arange(score.shape[0], dtype=np.int64)[:, None] * _ROW
    for level in range(score.shape[1]):
        where = row[item]
        keys = (offset - score[:, level]).ravel()
        # Children with total + score > goal; for a node that wins ties, ≥ goal.
        reach = np.minimum(total - goal[item] + (order < 0), _ROW - 1)
        children = np.searchsorted(keys, where * _ROW + reach) - where * score.shape[2]
        on = np.flatnonzero(order == 0)  # still a prefix of the path, which the path's own next token extends
        if len(on):
            own = path[where[on], level]
            children[on] = np.where(depth[item[on]] == level, own, np.maximum(children[on], own + 1))
        touched[item[children == score.shape[2]]] = True
        count += np.bincount(item, children, len(count)).astype(np.int64)
        keep = (children > 0) & (count[item] <= limit)
        if level + 1 == score.shape[1] or not keep.any():
            break
        item, total, order, children = item[keep], total[keep], order[keep], children[keep]
        parent = np.repeat(np.arange(len(item)), children)
        rank = np.arange(len(parent)) - np.repeat(children.cumsum() - children, children)
        item, order, where = item[parent], order[parent], row[item[parent]]
        total = total[parent] + score[where, level, rank]
        order = np.where(order == 0, np.sign(rank - path[where, level]), order).astype(np.int8)
    return count, touched


def expected_depth(logprobs: Array, budgets: list[int], slots: Array | None = None) -> Array:
    """Σ q(u) over the nodes u of each budget's tree: the accepted depth that the drafter itself predicts.

    logprobs: see `scores`; a drafter whose marginals were the truth would have τ = 1 + this. Returns [R,
    budgets].
    """
    limit = max(budgets)
    # Of the sums of two descending lists, the best `limit` are at (i, j) with (i+1)(j+1) ≤ limit.
    pairs = np.array([(i, j) for i in range(limit) for j in range(limit // (i + 1))])
    last = np.zeros((len(logprobs), 1))
    levels = []
    for level in range(logprobs.shape[1]):
        here = logprobs[:, level]
        usable = pairs[(pairs[:, 0] < last.shape[1]) & (pairs[:, 1] < here.shape[1])]
        last = best(last[:, usable[:, 0]] + here[:, usable[:, 1]], limit)
        if slots is not None:
            last = np.where((level < slots)[:, None], last, -np.inf)
        levels.append(last)
    chance = np.exp(best(np.concatenate(levels, 1), limit)).cumsum(1)
    return chance[:, np.minimum(np.array(budgets), chance.shape[1]) - 1]


def best(values: Array, count: int) -> Array:
    """The `count` largest along the last axis (or all, if fewer), descending."""
    size = values.shape[-1]
    if count < size:
        values = np.partition(values, size - count, axis=-1)[..., size - count :]
    return np.sort(values, axis=-1)[..., ::-1]
