"""How deep each verifier accepts the blocks of a batch, given their logits and the true tokens.

Equal logits are ranked by token id, lower first, as argmax and a stable sort do. What needs the logits runs where they
are (`Condensed`); the trees are counted on the host, from short lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from taugate.drafter.cached import LARGEST_TREE, Verifier
from taugate.drafter.device import Fetched
from taugate.drafter.rowstats import row_stats, top_values
from taugate.drafter.tree import best, expected_depth, pop_numbers, scores
from taugate.errors import EvidenceError

Array = np.ndarray[Any, Any]
NARROW = 128


@dataclass(frozen=True)
class Drafts:
    """R blocks of L drafted slots, all on one device.

    logits [R, L, V], of any floating dtype. truth [R, L] int64: true tokens, -1 past the end of the text or of the
    block. slots [R]: how many of the L slots were drafted. proposal [R, L]: what DFlash 2's selector chose; else the
    argmax.
    """

    logits: Tensor
    truth: Tensor
    slots: Tensor
    proposal: Tensor | None = None


@dataclass(frozen=True)
class Judged:
    """accepted: by verifier, depth [R]; arrivals [R, L]: pop numbers (see AnchorTable); predicted: by tree, [R]."""

    accepted: dict[str, Array]
    arrivals: Array | None = None
    predicted: dict[str, Array] = field(default_factory=dict)


def chain_depth(drafts: Drafts) -> Tensor:
    """Length [R] of the proposal's leading run of true tokens, on the drafts' device."""
    return _right(drafts, None).int().cumprod(1).sum(1)


def _right(drafts: Drafts, ranks: Tensor | None) -> Tensor:
    """Where the proposal is the true token, bool [R, L]."""
    if drafts.proposal is not None:
        return drafts.proposal == drafts.truth
    if ranks is not None:
        return ranks == 0
    if drafts.logits.is_cuda:
        return row_stats(drafts.logits.flatten(0, 1), drafts.truth.flatten())[0].view_as(drafts.truth) == 0
    return torch.from_numpy(_numbers(drafts.logits).argmax(-1)) == drafts.truth


class Condensed:
    """All that the judgement needs of a batch's logits. On a GPU it is only queued: `judge` may come later, when the
    next batch is under way.
    """

    def __init__(self, drafts: Drafts, verifiers: Sequence[Verifier], predict: bool = False) -> None:
        self.logits, self.verifiers = drafts.logits, verifiers
        self.trees = [v for v in verifiers if v.kind == "ddtree"]
        self.predict = predict
        # Most questions are settled by the best few of each slot; the rest gets lists as long as the largest tree.
        self.width = max([NARROW, *(v.size for v in self.trees if predict)])
        ranks, lists = None, {}
        if self.trees or any(v.kind == "topk" for v in verifiers):
            ranks, lists = _ranks_and_lists(drafts, self.width if self.trees else 0)
            lists["ranks"] = ranks
        if any(v.kind == "chain" for v in verifiers):
            lists["right"] = _right(drafts, ranks)
        self.host = Fetched(slots=drafts.slots, **lists)

    def judge(self) -> Judged:
        """Raises EvidenceError for logits that are not finite."""
        host, trees = self.host, self.trees
        pops, predicted = None, {}
        if trees:
            slots, ranks = host["slots"], host["ranks"]
            logprobs = host["top"].astype(np.float64) - host["total"][..., None]
            if not np.isfinite(host["total"]).all():
                raise EvidenceError("the drafter's logits are not finite; its weights or the states are damaged")
            pops, unknown = pop_numbers(scores(logprobs, slots), ranks, LARGEST_TREE)
            longest = min(LARGEST_TREE, self.logits.shape[-1])
            if self.width < longest and unknown.any():
                rows = np.flatnonzero(unknown)
                lists = host.beside(lambda: _longest(self.logits, rows, longest))
                logprobs_there = lists.astype(np.float64) - host["total"][rows, :, None]
                pops[rows] = pop_numbers(scores(logprobs_there, slots[rows]), ranks[rows], LARGEST_TREE)[0]
            if self.predict:
                sums = expected_depth(logprobs, [v.size for v in trees], slots)
                predicted = {v.name: sums[:, column] for column, v in enumerate(trees)}
        accepted = {}
        for verifier in self.verifiers:
            if verifier.kind == "chain":
                accepted[verifier.name] = _run(host["right"])
            elif verifier.kind == "topk":
                accepted[verifier.name] = _run((host["ranks"] >= 0) & (host["ranks"] < verifier.size))
            else:
                accepted[verifier.name] = (pops <= verifier.size).sum(1)
        return Judged(accepted, pops, predicted)


def judge(drafts: Drafts, verifiers: Sequence[Verifier], predict: bool = False) -> Judged:
    """Judge every block by every verifier. Raises EvidenceError for logits that are not finite."""
    return Condensed(drafts, verifiers, predict).judge()


def _run(ok: Array) -> Array:
    """Length [R] of the leading run of True in each row of `ok` [R, L]."""
    return np.logical_and.accumulate(ok, axis=1).sum(1)


def _ranks_and_lists(drafts: Drafts, width: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Rank [R, L] of the true token in its slot, -1 without one; and if `width`, the best logits `top` [R, L, width]
    with log Σ exp of all, `total` [R, L].
    """
    logits, truth = drafts.logits.flatten(0, 1), drafts.truth.flatten()
    shape = drafts.truth.shape
    if logits.is_cuda:
        ranks, total, maxima = row_stats(logits, truth)
        top = top_values(logits, maxima, width) if width else None
    else:
        numbers = _numbers(logits)
        top = torch.from_numpy(best(numbers, width or NARROW).copy())
        ranks = torch.from_numpy(_ranks(numbers, truth.numpy(), top.numpy()))
        # Of torch's ways to a normaliser the softmax is the fastest: its largest value is exp(peak - total).
        total = top[:, 0] - logits.float().softmax(-1).amax(-1).log()
        top = top if width else None
    lists = {} if top is None else {"top": top.unflatten(0, shape), "total": total.view(shape)}
    return ranks.view(shape), lists


def _ranks(logits: Array, truth: Array, top: Array) -> Array:
    """Rank [M] of `truth` [M] in the rows of `logits` [M, V] of which `top` [M, K] is the beginning; -1 without one."""
    own = logits[np.arange(len(truth)), np.maximum(truth, 0)][:, None]
    ranks = (top > own).sum(1)
    # Equal ones are told apart by token id, and may lie beyond the list, as the true token itself may.
    for row in np.flatnonzero(((top == own).sum(1) > 1) | (own[:, 0] <= top[:, -1])):
        mine = logits[row]
        ranks[row] = np.count_nonzero(mine > own[row]) + np.count_nonzero(mine[: max(truth[row], 0)] == own[row])
    return np.where(truth < 0, -1, ranks)


def _numbers(logits: Tensor) -> Array:
    return logits.float().numpy()


def _longest(logits: Tensor, rows: Array, count: int) -> Tensor:
    """The `count` largest logits, descending, of each slot of `rows`."""
    some = logits[torch.from_numpy(rows).to(logits.device)].float()
    if logits.is_cuda:
        return some.topk(count, dim=-1).values
    return torch.from_numpy(best(_numbers(some), count).copy())


def overlaps(
    drafts: Drafts, first: int, final_hidden: Tensor, head: Tensor, temperature: float
) -> list[tuple[float, ...]]:
    """Σ min(p, q) of each slot that has a truth: the chance that rejection sampling keeps a token sampled there.

    Blocks are those at anchors `first`, `first` + 1, …. p comes from the target's state one position earlier
    (`final_hidden` [S, H]), given the cached text before it; q from the drafter, both at `temperature`, top-p and top-k
    off. Raises EvidenceError for DFlash 2, whose q depends on what it sampled before.
    """
    if drafts.proposal is not None:
        raise EvidenceError(
            "Σ min(p, q) is not defined per slot for a DFlash 2 drafter: its selector samples along a path"
        )
    rows, slots = drafts.truth.shape
    before = final_hidden[first : first + rows + slots - 1].to(head)
    p = ((before @ head.T).float() / temperature).softmax(-1)
    out = []
    for row, count in enumerate((drafts.truth >= 0).sum(1).tolist()):
        q = (drafts.logits[row, :count].float() / temperature).softmax(-1)
        out.append(torch.minimum(p[row : row + count], q).sum(-1))
    return [tuple(each.tolist()) for each in out]
