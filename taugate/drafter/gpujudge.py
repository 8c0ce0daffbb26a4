"""Judging blocks on a GPU: what needs their logits is queued there, and the trees are counted there, too."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from taugate.drafter.cached import LARGEST_TREE, Verifier
from taugate.drafter.device import Fetched
from taugate.drafter.drafts import Drafts, Judged, accepted_depths, check_finite
from taugate.drafter.popkernel import expected_depth_there, pop_numbers_there, scores_there
from taugate.drafter.rowstats import row_stats, top_values


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
        self.drafts, self.verifiers = drafts, verifiers  # the logits are kept for as long as they may be read
        self.budgets = {v.name: v.size for v in verifiers if v.kind == "ddtree"}
        lists: dict[str, Tensor] = {}
        ranks: Tensor | None = None
        if any(v.kind != "chain" for v in verifiers):
            logits, shape = drafts.logits.flatten(0, 1), drafts.truth.shape
            found, total, best = row_stats(logits, drafts.truth.flatten())
            ranks = found.view(shape)
            lists["ranks"] = ranks
            if self.budgets:
                # No tree takes more tokens of a slot than it has nodes.
                logprobs = top_values(logits, best, LARGEST_TREE).double() - total[:, None].double()
                logprobs = logprobs.unflatten(0, shape)
                lists["pops"] = pop_numbers_there(scores_there(logprobs, drafts.slots), ranks, LARGEST_TREE)
                lists["total"] = total
                if predict:
                    lists["sums"] = expected_depth_there(logprobs, list(self.budgets.values()), drafts.slots)
        if any(v.kind == "chain" for v in verifiers):
            lists["right"] = gpu_right(drafts, ranks)
        self.names, self.host = list(lists), Fetched(**lists)

    def judge(self) -> Judged:
        """Raises EvidenceError for logits that are not finite."""
        host, predicted = {name: self.host[name] for name in self.names}, {}
        if self.budgets:
            check_finite(host["total"])
        if "sums" in host:
            predicted = {name: host["sums"][:, column] for column, name in enumerate(self.budgets)}
        return Judged(accepted_depths(self.verifiers, host), host.get("pops"), predicted)
