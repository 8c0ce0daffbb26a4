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
from taugate.drafter.popkernel import pop_numbers_there, scores_there
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
        self.drafts, self.verifiers, self.predict = drafts, verifiers, predict
        self.trees = [v for v in verifiers if v.kind == "ddtree"]
        # Most questions are settled by the best few of each slot; the rest gets lists as long as the largest tree.
        self.width = max([NARROW, *(v.size for v in self.trees if predict)])
        self.longest = min(LARGEST_TREE, drafts.logits.shape[-1])
        lists: dict[str, Tensor] = {}
        if self.trees or any(v.kind == "topk" for v in verifiers):
            self._rank()
            lists["ranks"] = self.ranks
        if any(v.kind == "chain" for v in verifiers):
            lists["right"] = _right(drafts, lists.get("ranks"))
        if self.trees:
            logprobs = self._logprobs(slice(None), self.width)
            lists["pops"], lists["unknown"] = self._pops(slice(None), logprobs)
            lists["total"] = self.total
            if predict:
                lists |= {"logprobs": logprobs, "slots": drafts.slots}
        self.host = Fetched(**lists)

    def judge(self) -> Judged:
        """Raises EvidenceError for logits that are not finite."""
        host, pops, predicted = self.host, None, {}
        if self.trees:
            _sound(host["total"])
            pops, unknown = host["pops"], host["unknown"]
            if self.width < self.longest and unknown.any():
                rows = torch.from_numpy(np.flatnonzero(unknown))
                pops[unknown] = host.beside(lambda: self._again(rows.to(self.ranks.device)))
            if self.predict:
                sums = expected_depth(host["logprobs"], [v.size for v in self.trees], host["slots"])
                predicted = {v.name: sums[:, column] for column, v in enumerate(self.trees)}
        accepted = {}
        for verifier in self.verifiers:
            if verifier.kind == "chain":
                accepted[verifier.name] = _run(host["right"])
            elif verifier.kind == "topk":
                accepted[verifier.name] = _run((host["ranks"] >= 0) & (host["ranks"] < verifier.size))
            else:
                accepted[verifier.name] = (pops <= verifier.size).sum(1)
        return Judged(accepted, pops, predicted)

    def _rank(self) -> None:
        """ranks [R, L] of the true tokens, -1 without one; total [R, L], log Σ exp of all logits; and where the best
        of each row are, in the form that is of use on this device.
        """
        logits, truth = self.drafts.logits.flatten(0, 1), self.drafts.truth.flatten()
        if logits.is_cuda:
            ranks, total, self.best = row_stats(logits, truth)
        else:
            self.best = torch.from_numpy(best(_numbers(logits), self.width).copy())
            ranks = torch.from_numpy(_ranks(_numbers(logits), truth.numpy(), self.best.numpy()))
            # Of torch's ways to a normaliser the softmax is the fastest: its largest value is exp(peak - total).
            total = self.best[:, 0] - logits.float().softmax(-1).amax(-1).log()
            _sound(total.numpy())
        shape = self.drafts.truth.shape
        self.ranks, self.total, self.best = ranks.view(shape), total.view(shape), self.best.unflatten(0, shape)

    def _logprobs(self, rows: slice | Tensor, count: int) -> Tensor:
        """The `count` largest log-probabilities of each slot of `rows`, float64, descending."""
        logits, known = self.drafts.logits[rows], self.best[rows]
        if logits.is_cuda:
            top = top_values(logits.flatten(0, 1), known.flatten(0, 1), count).unflatten(0, logits.shape[:2])
        elif count <= known.shape[-1]:
            top = known
        else:
            top = torch.from_numpy(best(_numbers(logits), count).copy())
        return top.double() - self.total[rows][..., None].double()

    def _pops(self, rows: slice | Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Pop numbers [rows, L], and which rows need longer lists."""
        slots, ranks = self.drafts.slots[rows], self.ranks[rows]
        if logprobs.is_cuda:
            return pop_numbers_there(scores_there(logprobs, slots), ranks, LARGEST_TREE)
        found, unknown = pop_numbers(scores(logprobs.numpy(), slots.numpy()), ranks.numpy(), LARGEST_TREE)
        return torch.from_numpy(found), torch.from_numpy(unknown)

    def _again(self, rows: Tensor) -> Tensor:
        return self._pops(rows, self._logprobs(rows, self.longest))[0]


def judge(drafts: Drafts, verifiers: Sequence[Verifier], predict: bool = False) -> Judged:
    """Judge every block by every verifier. Raises EvidenceError for logits that are not finite."""
    return Condensed(drafts, verifiers, predict).judge()


def _sound(total: Array) -> None:
    if not np.isfinite(total).all():
        raise EvidenceError("the drafter's logits are not finite; its weights or the states are damaged")


def _run(ok: Array) -> Array:
    """Length [R] of the leading run of True in each row of `ok` [R, L]."""
    return np.logical_and.accumulate(ok, axis=1).sum(1)


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
