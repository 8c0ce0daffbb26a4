"""Draft trees on a GPU: pop numbers with one program per row and depth, and what the drafter expects of each tree.

The host would need longer for the trees of a batch than a GPU for drafting it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from taugate.drafter.tree import ABSENT, LOWEST, UNIT, pairs


def scores_there(logprobs: Tensor, slots: Tensor) -> Tensor:
    """`tree.scores` of log-probabilities [R, L, K] (float64) where they are; slots [R]."""
    out = (logprobs.clamp(min=-LOWEST * UNIT) / UNIT).round().long()
    absent = torch.arange(out.shape[1], device=out.device) >= slots[:, None]
    return out.masked_fill_(absent[..., None], ABSENT)


def expected_depth_there(logprobs: Tensor, budgets: Sequence[int], slots: Tensor) -> Tensor:
    """`tree.expected_depth` of log-probabilities [R, L, K] (float64) where they are: float64 [R, budgets]."""
    limit = max(budgets)
    last, levels = logprobs.new_zeros(len(logprobs), 1), []
    for level in range(logprobs.shape[1]):
        here = logprobs[:, level, :limit]
        first, second = _pairs(limit, last.shape[1], here.shape[1], logprobs.device)
        sums = last[:, first] + here[:, second]
        last = sums.topk(min(limit, sums.shape[1])).values.masked_fill_((level >= slots)[:, None], -torch.inf)
        levels.append(last)
    nodes = torch.cat(levels, 1)
    chance = nodes.topk(min(limit, nodes.shape[1])).values.exp().cumsum(1)
    return chance[:, [min(budget, chance.shape[1]) - 1 for budget in budgets]]


@cache
def _pairs(limit: int, left: int, right: int, device: torch.device) -> Tensor:
    """`pairs` of lists of those lengths, [2, pairs]."""
    return torch.tensor([(i, j) for i, j in pairs(limit) if i < left and j < right], device=device).T


def pop_numbers_there(score: Tensor, path: Tensor, limit: int) -> Tensor:
    """As `treecount.pop_numbers`, of tensors on a GPU: score [R, L, K] int64, with K the vocabulary's size or at least
    `limit`, path [R, L] int; int64 [R, L].
    """
    (rows, levels, width), path = score.shape, path.long()
    ranks = torch.where(path < 0, limit, path)
    own = score.gather(2, ranks.clamp(max=width - 1)[..., None])[..., 0].cumsum(1)
    # As many nodes precede the path as have no larger rank anywhere, at least.
    asked = _so_far(((ranks + 1.0).double().cumprod(1).cumsum(1) <= limit) & (ranks < width))
    room = 1 << (limit - 1).bit_length()
    count = torch.full((rows, levels), limit + 1, dtype=torch.int32, device=score.device)
    totals = torch.empty(rows * levels, 2, room, dtype=torch.int64, device=score.device)
    orders = torch.empty(rows * levels, 2, room, dtype=torch.int32, device=score.device)
    ends = torch.empty(rows * levels, room, dtype=torch.int32, device=score.device)
    _kernel()[(rows * levels,)](
        score.contiguous(), path.int().contiguous(), own.contiguous(), asked.int(), count,
        totals, orders, ends, levels, width, limit, ABSENT,
        ROOM=room, STEPS=width.bit_length() + 1, HALVINGS=room.bit_length() + 1, num_warps=4,
    )  # fmt: skip
    return torch.where(asked, count.clamp(max=limit) + 1, limit + 1)


def _so_far(ok: Tensor) -> Tensor:
    """Whether everything up to here is True, along the last axis."""
    return ok.int().cumprod(1) > 0


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        score, path, goals, asked, counts, totals, orders, ends, levels, width, limit, absent,
        ROOM: tl.constexpr, STEPS: tl.constexpr, HALVINGS: tl.constexpr,
    ):  # fmt: skip
        # See tree._preceding: the frontier holds the nodes of one level that precede the path's prefix of this depth.
        program = tl.program_id(0).to(tl.int64)
        row, depth = program // levels, program % levels
        goal = tl.load(goals + program)
        item = tl.arange(0, ROOM)
        wanted = tl.load(asked + program)  # 1 or 0: with no node to begin with, nothing is counted
        size, level = wanted, tl.full([], 0, tl.int32)
        count = tl.full([], 0, tl.int32)
        frontier, end = program * 2 * ROOM, program * ROOM
        tl.store(totals + frontier + item, tl.zeros([ROOM], tl.int64), mask=item < 1)
        tl.store(orders + frontier + item, tl.zeros([ROOM], tl.int32), mask=item < 1)
        tl.debug_barrier()
        while size > 0:
            here, there = frontier + (level % 2) * ROOM, frontier + ((level + 1) % 2) * ROOM
            listed = score + (row * levels + level) * width
            own = tl.load(path + row * levels + level)
            valid = item < size
            total = tl.load(totals + here + item, mask=valid, other=0)
            order = tl.load(orders + here + item, mask=valid, other=1)
            # Children are those whose score exceeds this; for a node that wins ties, reaches it.
            least = tl.maximum(goal - total - tl.where(order < 0, 1, 0), absent)
            low, high = tl.zeros([ROOM], tl.int32), tl.zeros([ROOM], tl.int32) + width
            for _ in range(STEPS):
                open_ = valid & (low < high)
                middle = (low + high) // 2
                value = tl.load(listed + middle, mask=open_, other=0)
                low = tl.where(open_ & (value > least), middle + 1, low)
                high = tl.where(open_ & (value <= least), middle, high)
            children = tl.where(order == 0, tl.where(level == depth, own, tl.maximum(low, own + 1)), low)
            children = tl.where(valid, children, 0)
            born = tl.sum(children)
            count += born
            born = tl.where(level + 1 < levels, tl.where(count <= limit, born, 0), 0)
            tl.store(ends + end + item, tl.cumsum(children, 0))
            tl.debug_barrier()
            # The frontier's children in order: the n-th has the first parent whose children end beyond n.
            live = item < born
            low, high = tl.zeros([ROOM], tl.int32), tl.zeros([ROOM], tl.int32) + ROOM
            for _ in range(HALVINGS):
                open_ = live & (low < high)
                middle = (low + high) // 2
                value = tl.load(ends + end + middle, mask=open_, other=0)
                high = tl.where(open_ & (value > item), middle, high)
                low = tl.where(open_ & (value <= item), middle + 1, low)
            rank = item - tl.load(ends + end + low - 1, mask=live & (low > 0), other=0)
            total = tl.load(totals + here + low, mask=live, other=0) + tl.load(listed + rank, mask=live, other=0)
            order = tl.load(orders + here + low, mask=live, other=1)
            order = tl.where(order == 0, tl.where(rank < own, -1, tl.where(rank > own, 1, 0)), order)
            tl.store(totals + there + item, total, mask=live)
            tl.store(orders + there + item, order, mask=live)
            tl.debug_barrier()
            size, level = born, level + 1
        tl.store(counts + program, count, mask=wanted > 0)

    return kernel
