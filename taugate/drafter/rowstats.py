"""What judging needs to know of each row of logits, in one pass over them, on a GPU.

A vocabulary of 248,320 makes logits the largest thing that a replay touches: rank of the true token, normaliser and
the places of the best are read off in one kernel, instead of one pass each.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 4096  # logits at a time; token t belongs to group t mod WIDTH, so that nothing is reduced before the end


def row_stats(logits: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per row of `logits` [M, V] (any floating dtype) and `truth` [M] int64 (-1 for none):

    ranks [M] int32: how many logits come before the true token's, equal ones by token id; -1 without a truth. What is
    not a number comes before everything. totals [M] fp32: log Σ exp. peaks [M, 4096] fp32: the largest logit of each
    group of tokens that are equal mod 4096.
    """
    from taugate.drafter import rowkernels

    rows, vocabulary = logits.shape
    peaks = torch.empty(rows, WIDTH, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    totals = torch.empty(rows, dtype=torch.float32, device=logits.device)
    given = logits, truth, peaks, ranks, totals, vocabulary, logits.stride(0)
    rowkernels.row_stats[(rows,)](*given, WIDTH=WIDTH, num_warps=8)
    return ranks, totals, peaks


def top_values(logits: Tensor, peaks: Tensor, count: int) -> Tensor:
    """The `count` largest of each row of `logits` [M, V], descending, fp32; at most as many as the vocabulary has.

    peaks: see `row_stats`. Of the groups, `count` have a logit that reaches the count-th best peak, so that the largest
    logits all reach it, and few others do.
    """
    from taugate.drafter import rowkernels

    rows, vocabulary = logits.shape
    count = min(count, vocabulary, WIDTH)
    room = 1 << (count + count // 2 - 1).bit_length()
    found = torch.empty(rows, room, dtype=torch.float32, device=logits.device)
    given = logits, peaks, found, vocabulary, logits.stride(0), count
    rowkernels.largest[(rows,)](*given, WIDTH=WIDTH, ROOM=room, num_warps=8)
    return found.sort(-1, descending=True).values[:, :count]
