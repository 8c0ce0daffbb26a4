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
NARROW = 128


@dataclass(frozen=True)
class Drafts:
    """R blocks of L drafted slots.

    logits [R, L, V] fp32, on any device. truth [R, L]: true tokens, -1 past the end
    of the text slots [R]: how many of the L slots were drafted. proposal [R, L]: what DFlash 2's selector
    chose; else the argmax.
    """

    logits: Tensor
    truth: Array
    slots: Array
    proposal: Tensor | None = None


@dataclass(frozen=True)
class Judged:
    """accepted: by verifier, depth [R]; arrivals [R, L]: pop numbers (see AnchorTable); predicted: by tree,
    [R].
    """

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
    ranks = pops = None
    predicted: dict[str, Array] = {}
    if trees or any(v.kind == "topk" for v in verifiers):
        # Most questions are settled by the best few of each slot; the others get lists as long as the largest tree.
        width = max([NARROW, *(v.size for v in verifiers if v.kind == "topk"), *(v.size for v in trees if predict)])
        top = _top(logits, min(width, logits.shape[-1]))
        ranks = _ranks(logits, top, truth)
    elif drafts.proposal is None:
        ranks = np.where(logits.argmax(-1).cpu().numpy() == truth, 0, 1)
    if trees:
        normal = _log_total(logits, top)
        pops, unknown = pop_numbers(scores(top - normal, slots), ranks, LARGEST_TREE)
        if top.shape[-1] < min(LARGEST_TREE, logits.shape[-1]) and unknown.any():
            rows = np.flatnonzero(unknown)
            some = logits[torch.from_numpy(rows).to(logits.device)]
            longer = _top(some, min(LARGEST_TREE, logits.shape[-1]))
            further = _ranks(some, longer, truth[rows])
            pops[rows] = pop_numbers(scores(longer - normal[rows], slots[rows]), further, LARGEST_TREE)[0]
        if predict:
            sums = expected_depth(top - normal, [v.size for v in trees], slots)
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


def _log_total(logits: Tensor, top: Array) -> Array:
    """log Σ exp of each slot's logits, float64 [R, L, 1]; `top` holds the largest of them first."""
    peak = torch.from_numpy(top[..., :1].copy()).to(logits.device)
    total = (logits - peak).exp_().sum(-1, keepdim=True)
    if not total.isfinite().all():
        raise EvidenceError("the drafter's logits are not finite; its weights or the states are damaged")
    return (peak.double() + total.double().log()).cpu().numpy()


def _top(logits: Tensor, count: int) -> Array:
    """The `count` largest logits of each slot, descending.

    On a CPU numpy partitions faster than torch sorts.
    """
    if logits.is_cuda:
        return logits.topk(count, dim=-1).values.cpu().numpy()
    return best(logits.numpy(), count)


def _ranks(logits: Tensor, top: Array, truth: Array) -> Array:
    """Rank [R, L] of the true token in its slot; -1 without a truth, the width of `top` for anything beyond
    it.
    """
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
    """Σ min(p, q) of each slot that has a truth: the chance that rejection sampling keeps a token sampled
    there.

    p comes from the target's state one position earlier (`final_hidden` [S, H]), given the cached text before
    it; q from the drafter, both at `temperature`, top-p and top-k off. Raises EvidenceError for DFlash 2,
    whose q depends on what it sampled before.
    """
    if drafts.proposal is not None:
        raise EvidenceError(
            "Σ min(p, q) is not defined per slot for a DFlash 2 drafter: its selector samples along a path"
        )
    out = []
    for row, anchor in enumerate(anchors):
        count = int((drafts.truth[row] >= 0).sum())
        before = final_hidden[anchor : anchor + count].to(head)
        p = ((before @ head.T).float() / temperature).softmax(-1)
        q = (drafts.logits[row, :count] / temperature).softmax(-1)
        out.append(tuple(torch.minimum(p, q).sum(-1).tolist()))
    return out
