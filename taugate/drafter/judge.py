"""How deep each verifier accepts the blocks of a batch, given their logits and the true tokens.

Equal logits are ranked by token id, lower first, as argmax and a stable sort do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from taugate.drafter.cached import LARGEST_TREE, Verifier
from taugate.drafter.tree import best, expected_depth, pop_numbers, scores
from taugate.errors import EvidenceError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Drafts:
    """R blocks of L drafted slots.

    logits [R, L, V] fp32, on any device; judging overwrites them. truth [R, L]: true tokens, -1 past the end of the text
    slots [R]: how many of the L slots were drafted. proposal [R, L]: what DFlash 2's selector chose; else the argmax.
    """

    logits: Tensor
    truth: Array
    slots: Array
    proposal: Tensor | None = None


@dataclass(frozen=True)
class Judged:
    """accepted: by verifier, depth [R]; arrivals [R, L]: pop numbers (see AnchorTable); predicted: by tree, [R]."""

    accepted: dict[str, Array]
    arrivals: Array | None = None
    predicted: dict[str, Array] = field(default_factory=dict)


def prefix(ok: Array) -> Array:
    """Length [R] of the leading run of True in each row of `ok` [R, L]."""
    return np.logical_and.accumulate(ok, axis=1).sum(1)


def judge(drafts: Drafts, verifiers: Sequence[Verifier], predict: bool = False) -> Judged:
    """Judge every block by every verifier. Raises EvidenceError for logits that are not finite."""
    logits, slots = drafts.logits, drafts.slots
    truth = np.where(np.arange(drafts.truth.shape[1]) < slots[:, None], drafts.truth, -1)
    trees = [v for v in verifiers if v.kind == "ddtree"]
    widths = [LARGEST_TREE] * bool(trees) + [v.size for v in verifiers if v.kind == "topk"]
    ranks = pops = None
    predicted: dict[str, Array] = {}
    if widths:
        top = _top(logits, min(max(widths), logits.shape[-1]))
        ranks = _ranks(logits, top, truth)
    elif drafts.proposal is None:
        ranks = np.where(logits.argmax(-1).cpu().numpy() == truth, 0, 1)
    if trees:
        # The logits are not needed any more, and exponentials in place save a pass over memory.
        peak = top[..., :1].copy()
        total = (
            logits.sub_(torch.from_numpy(peak).to(logits.device)).exp_().sum(-1).double().log().cpu().numpy()
        )
        logprobs = top[..., :LARGEST_TREE].astype(np.float64) - peak - total[..., None]
        if not np.isfinite(logprobs[..., 0]).all():
            raise EvidenceError("the drafter's logits are not finite; its weights or the states are damaged")
        pops = pop_numbers(scores(logprobs, slots), ranks, LARGEST_TREE)
        if predict:
            sums = expected_depth(logprobs, [v.size for v in trees], slots)
            predicted = {v.name: sums[:, column] for column, v in enumerate(trees)}
    accepted = {}
    for verifier in verifiers:
        if verifier.kind == "chain":
            right = ranks == 0 if drafts.proposal is None else drafts.proposal.cpu().numpy() == truth
            accepted[verifier.name] = prefix(right)
        elif verifier.kind == "topk":
            accepted[verifier.name] = prefix((ranks >= 0) & (ranks < verifier.size))
        else:
            accepted[verifier.name] = (pops <= verifier.size).sum(1)
    return Judged(accepted, pops, predicted)


def _top(logits: Tensor, count: int) -> Array:
    """The `count` largest logits of each slot, descending. On a CPU numpy partitions faster than torch sorts."""
    if logits.is_cuda:
        return logits.topk(count, dim=-1).values.cpu().numpy()
    return best(logits.numpy(), count)


def _ranks(logits: Tensor, top: Array, truth: Array) -> Array:
    """Rank [R, L] of the true token in its slot; -1 without a truth, the width of `top` for anything beyond it."""
    index = torch.from_numpy(np.maximum(truth, 0)).to(logits.device)
    own = logits.gather(2, index[..., None])[..., 0].cpu().numpy()
    ranks, width = np.full(truth.shape, -1), top.shape[-1]
    row, slot = np.nonzero(truth >= 0)
    mine = own[row, slot][:, None]
    better, equal = (top[row, slot] > mine).sum(1), (top[row, slot] == mine).sum(1)
    for tie in np.flatnonzero(equal > 1):
        # Ties may go on beyond `top`, so they are looked up among all logits.
        r, s = int(row[tie]), int(slot[tie])
        better[tie] += int((logits[r, s, : int(truth[r, s])] == float(own[r, s])).sum())
    ranks[row, slot] = np.minimum(better, width)
    return ranks


def overlaps(
    drafts: Drafts, anchors: Sequence[int], final_hidden: Tensor, head: Tensor, temperature: float
) -> list[tuple[float, ...]]:
    """Σ min(p, q) of each slot that has a truth: the chance that rejection sampling keeps a token sampled there.

    p comes from the target's state one position earlier (`final_hidden` [S, H]), given the cached text before it; q
    from the drafter, both at `temperature`, top-p and top-k off. Raises EvidenceError for DFlash 2, whose q depends on
    what it sampled before.
    """
    if drafts.proposal is not None:
        raise EvidenceError("Σ min(p, q) is not defined per slot for a DFlash 2 drafter: its selector samples along a path")
    out = []
    for row, anchor in enumerate(anchors):
        count = int((drafts.truth[row] >= 0).sum())
        before = final_hidden[anchor : anchor + count].to(head)
        p = ((before @ head.T).float() / temperature).softmax(-1)
        q = (drafts.logits[row, :count] / temperature).softmax(-1)
        out.append(tuple(torch.minimum(p, q).sum(-1).tolist()))
    return out
