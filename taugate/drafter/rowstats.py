"""What judging needs to know of each row of logits, in one pass over them, on a GPU.

A vocabulary of 248,320 makes logits the largest thing that a replay touches: rank of the true token, normaliser and
the places of the best are read off in one kernel, instead of one pass each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

WIDTH = 4096  # logits at a time; token t belongs to group t mod WIDTH, so that nothing is reduced before the end


def row_stats(logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per row of `logits` [M, V] (any floating dtype) and `truth` [M] int64 (-1 for none):

    ranks [M] int32: how many logits come before the true token's, equal ones by token id; -1 without a truth. What is
    not a number comes before everything. totals [M] fp32: log Σ exp. peaks [M, 4096] fp32: the largest logit of each
    group of tokens that are equal mod 4096.
    """
    rows, vocabulary = logits.shape
    peaks = torch.empty(rows, WIDTH, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    totals = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _kernel()[(rows,)](logits, truth, peaks, ranks, totals, vocabulary, logits.stride(0), WIDTH=WIDTH, num_warps=8)
    return ranks, totals, peaks


def top_values(logits: Tensor, peaks: Tensor, count: int) -> Tensor:
    """The `count` largest of each row of `logits` [M, V], descending, fp32: they lie in the `count` best groups."""
    vocabulary = logits.shape[1]
    groups = peaks.topk(min(count, WIDTH), dim=-1, sorted=False).indices
    steps = torch.arange(0, vocabulary, WIDTH, device=logits.device)
    index = (groups[:, None] + steps[:, None]).flatten(1)
    found = logits.gather(1, index.clamp(max=vocabulary - 1)).float()
    if vocabulary % WIDTH:
        found = found.masked_fill_(index >= vocabulary, float("-inf"))
    return found.topk(min(count, vocabulary), dim=-1).values


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(logits, truth, peaks, ranks, totals, vocabulary, stride, WIDTH: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, WIDTH)
        target = tl.load(truth + row)
        own = tl.load(logits + row * stride + tl.maximum(target, 0)).to(tl.float32)
        peak = tl.full([WIDTH], -float("inf"), tl.float32)
        total = tl.zeros([WIDTH], tl.float32)
        before = tl.zeros([WIDTH], tl.int32)
        for begin in range(0, vocabulary, WIDTH):
            at = begin + lane
            x = tl.load(logits + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
            before += tl.where(x <= own, 0, 1) + tl.where((x == own) & (at < target), 1, 0)
            now = tl.maximum(peak, x)
            level = tl.where(now == -float("inf"), 0.0, now)  # a pruned vocabulary may have nothing here
            total = total * tl.exp(peak - level) + tl.exp(x - level)
            peak = now
        tl.store(peaks + row * WIDTH + lane, peak)
        tl.store(ranks + row, tl.where(target < 0, -1, tl.sum(before)))
        highest = tl.max(peak)
        tl.store(totals + row, highest + tl.log(tl.sum(total * tl.exp(peak - highest))))

    return kernel
