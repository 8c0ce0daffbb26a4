"""Judging blocks on a GPU: what needs their logits is queued there, and the trees are counted there, too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from taugate.drafter.cached import LARGEST_TREE, Verifier
from taugate.drafter.device import Fetched
from taugate.drafter.drafts import Drafts, Judged, accepted_depths, check_finite
from taugate.drafter.popkernel import pop_numbers_there, scores_there
from taugate.drafter.rowstats import row_stats, top_values
from taugate.drafter.tree import expected_depth

NARROW = 128


def gpu_right(drafts: Drafts, ranks: Tensor | None = None) -> Tensor:
    """Where the proposal is the true token, bool [R, L]; ranks [R, L] of the true tokens, if known."""
    if drafts.proposal is not None:
        return drafts.proposal == drafts.truth
    if ranks is None:
        ranks = row_stats(drafts.logits.flatten(0, 1), drafts.truth.flatten())[0].view_as(drafts.truth)
    return ranks == 0


class Condensed:
    """All that the judgement needs of a batch's logits. It is only queued: `judge` may come later, when the next batch
    is under way.
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
            lists["right"] = gpu_right(drafts, lists.get("ranks"))
        if self.trees:
            logprobs = self._logprobs(slice(None), self.width)
            lists["pops"], lists["unknown"] = self._pops(slice(None), logprobs)
            lists["total"] = self.total
            if predict:
                lists |= {"logprobs": logprobs, "slots": drafts.slots}
        self.names, self.host = list(lists), Fetched(**lists)

    def judge(self) -> Judged:
        """Raises EvidenceError for logits that are not finite."""
        host, predicted = {name: self.host[name] for name in self.names}, {}
        if self.trees:
            check_finite(host["total"])
            unknown = host["unknown"]
            if self.width < self.longest and unknown.any():
                rows = torch.from_numpy(np.flatnonzero(unknown))
                host["pops"][unknown] = self.host.beside(lambda: self._again(rows.to(self.ranks.device)))
            if self.predict:
                sums = expected_depth(host["logprobs"], [v.size for v in self.trees], host["slots"])
                predicted = {v.name: sums[:, column] for column, v in enumerate(self.trees)}
        return Judged(accepted_depths(self.verifiers, host), host.get("pops"), predicted)

    def _rank(self) -> None:
        """ranks [R, L] of the true tokens, -1 without one; total [R, L], log Σ exp of all logits; and where the best
        of each row are.
        """
        logits, truth = self.drafts.logits.flatten(0, 1), self.drafts.truth.flatten()
        ranks, total, best = row_stats(logits, truth)
        shape = self.drafts.truth.shape
        self.ranks, self.total, self.best = ranks.view(shape), total.view(shape), best.unflatten(0, shape)

    def _logprobs(self, rows: slice | Tensor, count: int) -> Tensor:
        """The `count` largest log-probabilities of each slot of `rows`, float64, descending."""
        logits, known = self.drafts.logits[rows], self.best[rows]
        top = top_values(logits.flatten(0, 1), known.flatten(0, 1), count).unflatten(0, logits.shape[:2])
        return top.double() - self.total[rows][..., None].double()

    def _pops(self, rows: slice | Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Pop numbers [rows, L], and which rows need longer lists."""
        slots, ranks = self.drafts.slots[rows], self.ranks[rows]
        return pop_numbers_there(scores_there(logprobs, slots), ranks, LARGEST_TREE)

    def _again(self, rows: Tensor) -> Tensor:
        return self._pops(rows, self._logprobs(rows, self.longest))[0]
