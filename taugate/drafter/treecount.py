"""Pop numbers of draft trees on the host: how many nodes precede each prefix of the true continuation.

The counts that matter are at most as large as the largest tree. Most blocks have one prefix far beyond it, for which
counting alone would cost more than for all others; a histogram of scores excludes nearly all of these.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from taugate.drafter.tree import ABSENT, UNIT
from taugate.drafter.treelists import ROW, Lists

Array = np.ndarray[Any, Any]

BINS = 20  # of the histogram, each half a nat


def pop_numbers(score: Array, path: Array, limit: int, vocabulary: int | None = None) -> tuple[Array, Array]:
    """`numbers` from rectangular lists.

    score [R, L, K]: see `tree.scores`, of the K best of `vocabulary` tokens (or all there are). path [R, L]: rank of
    the true token in each slot (K or more if it is beyond the list), negative where the truth has ended.
    """
    width = score.shape[2]
    own = np.take_along_axis(score, np.clip(path, 0, width - 1)[..., None], 2)[..., 0]  # or a little too high
    lists = Lists.of(score, complete=(vocabulary or width) <= width)
    cost = np.where(score == ABSENT, np.inf, (score[..., :1] - score) * UNIT)
    return numbers(lists, path, own, candidates(cost, lists.best, path, own, limit), limit)


def candidates(cost: Array, best: Array, path: Array, own: Array, limit: int) -> Array:
    """Prefixes of each path that may be among the first `limit` nodes of its tree, bool [R, L]; few others.

    cost [R, L, G]: what some tokens of each slot cost more than its best one, in nats; inf for none. best, own [R, L]:
    scores of the best and the true tokens. path [R, L]: as in `numbers`, but never too high.
    """
    # Every node whose ranks are nowhere larger precedes it: Σ_k Π_{i≤k} (rank_i + 1) nodes, itself included.
    asked = so_far((path >= 0) & ((path + 1.0).cumprod(1).cumsum(1) <= limit))
    goal = own.cumsum(1)
    # At most 1/p nodes of one level have a probability of p: with fewer than `limit` in all, there is no doubt.
    row, depth = np.nonzero(asked & (goal < np.log(path.shape[1] / limit) / UNIT))
    asked[row, depth] = _at_least(cost, best, row, goal[row, depth]) < limit
    return so_far(asked)


def numbers(lists: Lists, path: Array, own: Array, asked: Array, limit: int) -> tuple[Array, Array]:
    """Pop number (1, 2, …) of every prefix of a path in its block's tree, `limit` + 1 where it exceeds `limit`.

    path [R, L]: rank of the true token in each slot, equal logits told apart by token id; negative where the truth has
    ended; of a token that is not listed, any number that it is not below. own [R, L]: its score. asked: `candidates`.
    Returns int64 [R, L], which ascends along L, because a prefix is popped before what it is a prefix of; and bool [R]:
    blocks whose lists are too short to tell.
    """
    goal = own.cumsum(1)
    row, depth = np.nonzero(asked)
    sure = goal[row, depth] > lists.horizon[row]
    mark = np.where(sure, goal[row, depth], lists.horizon[row])
    count = _preceding(lists, path, row, depth, mark, sure, limit)
    out = np.full(path.shape, limit + 1, dtype=np.int64)
    out[row, depth] = np.where(sure, np.minimum(count, limit), limit) + 1
    unknown = np.zeros(len(path), dtype=bool)
    unknown[row[~sure & (count < limit)]] = True
    return out, unknown


def so_far(ok: Array) -> Array:
    """Whether everything up to here is True, along the last axis."""
    return np.logical_and.accumulate(ok, axis=1)


def _at_least(cost: Array, best: Array, row: Array, mark: Array) -> Array:
    """A lower bound of the nodes of each block `row` with a score above `mark`, for any number of marks.

    Costs are rounded up to whole bins; those of the nodes of one level are then the convolution of its slots'
    histograms.
    """
    blocks, levels, _ = cost.shape
    # A little more than two bins a nat: rounding may not make a node better than it is.
    column = cost * cost.dtype.type(2.0001)
    np.minimum(np.ceil(column, out=column), BINS, out=column)
    cells = column.astype(np.int64)
    cells += np.arange(0, blocks * levels * (BINS + 1), BINS + 1).reshape(blocks, levels, 1)
    slots = np.bincount(cells.ravel(), minlength=blocks * levels * (BINS + 1))
    slots = slots.reshape(blocks, levels, BINS + 1)[..., BINS - 1 :: -1].astype(np.float64)
    # nodes[:, BINS + c]: how many nodes of this level cost c bins; no costs are negative.
    nodes = np.zeros((blocks, 2 * BINS))
    nodes[:, BINS] = 1
    windows = np.lib.stride_tricks.as_strided(nodes[:, 1:], (blocks, BINS, BINS), (*nodes.strides, nodes.strides[1]))
    sums = np.zeros((levels, blocks, BINS + 1))  # the first column: none at no cost
    for level in range(levels):
        nodes[:, BINS:] = np.einsum("rcb,rb->rc", windows, slots[:, level])
        nodes[:, BINS:].cumsum(1, out=sums[level, :, 1:])
    within = (best.cumsum(1)[row] - mark[:, None] - 1) >> 31  # of half a nat, 2^31 units
    return sums[np.arange(levels), row[:, None], np.clip(within, -1, BINS - 1) + 1].sum(1)


def _preceding(lists: Lists, path: Array, row: Array, depth: Array, goal: Array, on_path: Array, limit: int) -> Array:
    """Nodes popped before each (row, depth) of a path (or some number ≥ `limit`); where not `on_path`, those with a
    score above `goal`.

    The frontier holds the preceding nodes of one level that have children, all trees in one flat array. What precedes
    is closed under taking prefixes, so the next level's are among its children, and as ranks descend in score, they are
    the first few children of each. `order` compares a node's ranks with the path's: -1 before, 0 a prefix of it, 1
    after.
    """
    levels = path.shape[1]
    count = np.zeros(len(row), dtype=np.int64)
    item, short = np.arange(len(row)), -goal  # short: what a node's score exceeds the goal by
    order = np.where(on_path, 0, 1).astype(np.int8)
    for level in range(levels):
        where = row[item] * levels + level
        # Children with score > -short; of a node that wins ties, ≥.
        children = lists.before(where, short + (order < 0))
        on = np.flatnonzero(order == 0)  # still a prefix of the path, which the path's own next token extends
        further = depth[item[on]] > level
        own = path[row[item[on]], level]
        children[on] = np.where(further, np.maximum(children[on], own + 1), own)
        count += np.bincount(item, children, len(count)).astype(np.int64)
        if level + 1 == levels:
            break
        # Of the children, those that may have children themselves: most have none.
        fertile = np.minimum(lists.before(where, short + lists.best[row[item], level + 1] + 1), children)
        fertile[on] = np.where(further, np.maximum(fertile[on], own + 1), fertile[on])
        keep = np.flatnonzero((fertile > 0) & (count[item] < limit))
        if not len(keep):
            break
        fertile = fertile[keep]
        rank = np.arange(fertile.sum()) - np.repeat(fertile.cumsum() - fertile, fertile)
        parent = np.repeat(keep, fertile)
        item, order, where, short = item[parent], order[parent], where[parent], short[parent]
        short += where * ROW - lists.keys[lists.begin[where] + rank]
        on = np.flatnonzero(order == 0)
        order[on] = np.sign(rank[on] - path[row[item[on]], level])
    return count
