"""What judging needs to know of each row of logits, in one pass over them, on a GPU.

A vocabulary of 248,320 makes logits the largest thing that a replay touches: rank of the true token, normaliser and
the places of the best are read off in one kernel, instead of one pass each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

CHUNK = 64
_WIDTH = 4096  # logits in flight per program; a multiple of CHUNK


def row_stats(logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per row of `logits` [M, V] (any floating dtype) and `truth` [M] int64 (-1 for none):

    ranks [M] int32: how many logits come before the true token's, equal ones by token id; -1 without a truth. What is
    not a number comes before everything. totals [M] fp32: log Σ exp. maxima [M, ⌈V / 64⌉] fp32: of each chunk of 64.
    """
    import triton

    rows, vocabulary = logits.shape
    maxima = torch.empty(rows, triton.cdiv(vocabulary, CHUNK), dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    totals = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _kernel()[(rows,)](
        logits, truth, maxima, ranks, totals, vocabulary, logits.stride(0), maxima.shape[1],
        CHUNK=CHUNK, WIDTH=_WIDTH, num_warps=8,
    )  # fmt: skip
    return ranks, totals, maxima


def top_values(logits: Tensor, maxima: Tensor, count: int) -> Tensor:
    """The `count` largest of each row of `logits` [M, V], descending, fp32: they lie in the `count` best chunks."""
    vocabulary = logits.shape[1]
    chunks = maxima.topk(min(count, maxima.shape[1]), dim=-1, sorted=False).indices
    index = (chunks[..., None] * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(1)
    found = logits.gather(1, index.clamp(max=vocabulary - 1)).float()
    if vocabulary % CHUNK:
        found = found.masked_fill_(index >= vocabulary, float("-inf"))
    return found.topk(min(count, vocabulary), dim=-1).values


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        logits, truth, maxima, ranks, totals, vocabulary, stride, chunks, CHUNK: tl.constexpr, WIDTH: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(truth + row)
        own = tl.load(logits + row * stride + tl.maximum(target, 0)).to(tl.float32)
        peak, total, before = tl.full([], -float("inf"), tl.float32), tl.full([], 0.0, tl.float32), 0
        for begin in range(0, vocabulary, WIDTH):
            at = begin + tl.arange(0, WIDTH)
            x = tl.load(logits + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
            first = tl.where(x <= own, 0, 1) + tl.where((x == own) & (at < target), 1, 0)
            before += tl.sum(first)
            best = tl.max(tl.reshape(x, (WIDTH // CHUNK, CHUNK)), axis=1)
            chunk = begin // CHUNK + tl.arange(0, WIDTH // CHUNK)
            tl.store(maxima + row * chunks + chunk, best, mask=chunk < chunks)
            now = tl.maximum(peak, tl.max(best))
            level = tl.where(now == -float("inf"), 0.0, now)  # a pruned vocabulary may have nothing here
            total = total * tl.exp(peak - level) + tl.sum(tl.exp(x - level))
            peak = now
        tl.store(ranks + row, tl.where(target < 0, -1, before))
        tl.store(totals + row, peak + tl.log(total))

    return kernel
