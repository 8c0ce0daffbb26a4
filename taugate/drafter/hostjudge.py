"""Judging blocks on the host, where every pass over the logits counts beside a small drafter's forwards.

What needs a batch's logits follows its forward; trees are counted for many batches together, from short lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from taugate.drafter.cached import LARGEST_TREE, Verifier
from taugate.drafter.drafts import Drafts, Judged, accepted_depths, check_finite
from taugate.drafter.tree import LOWEST, UNIT, best, expected_depth
from taugate.drafter.treecount import candidates, numbers, so_far
from taugate.drafter.treelists import Lists, integers

Array = np.ndarray[Any, Any]

SCRATCH = 2**18  # bytes of chances at a time: more is memory that is given back and asked for anew at each batch
SPREAD = 128  # groups of tokens that are equal modulo this: most of the best are the largest of their group
GROUP = 32  # neighbouring tokens; of fewer, the largest takes torch ten times as long
SLACK = 1e-4  # nats: what fp32 thresholds may be wrong by


def host_right(drafts: Drafts) -> Tensor:
    """Where the proposal is the true token, bool [R, L]."""
    if drafts.proposal is not None:
        return drafts.proposal == drafts.truth
    return torch.from_numpy(drafts.logits.float().numpy().argmax(-1)) == drafts.truth


class Read:
    """All that the judgement needs of a batch's logits. Raises EvidenceError for logits that are not finite.

    found: what `accepted_depths` asks for, but for `pops`. For trees: score [R, L] of the true tokens, asked [R, L]
    (see `candidates`) and the lists that they need; sums [R, trees] with `predict`: `expected_depth`.
    """

    def __init__(self, drafts: Drafts, verifiers: Sequence[Verifier], predict: bool) -> None:
        self.found: dict[str, Array] = {}
        budgets = [v.size for v in verifiers if v.kind == "ddtree"]
        ranked = [1 if v.kind == "chain" else v.size for v in verifiers if v.kind != "ddtree"]
        kinds = {v.kind for v in verifiers}
        if budgets:
            logits = drafts.logits.flatten(0, 1).float()
            self._list(logits, drafts.truth.numpy(), drafts.slots.numpy(), max([0, *ranked]))
            if predict:
                top = best(logits.numpy().reshape(drafts.logits.shape), max(128, *budgets)).astype(np.float64)
                total = self.total.reshape(*drafts.truth.shape, 1)
                self.sums = expected_depth(top - total, budgets, drafts.slots.numpy())
        elif "topk" in kinds:
            ranks = _ranks(drafts.logits.flatten(0, 1).float().numpy(), drafts.truth.flatten().numpy())
            self.found["ranks"] = ranks.reshape(drafts.truth.shape)
        if "chain" in kinds and "ranks" in self.found and drafts.proposal is None:
            self.found["right"] = self.found["ranks"] == 0
        elif "chain" in kinds:
            self.found["right"] = host_right(drafts).numpy()

    def _list(self, logits: Tensor, truth: Array, slots: Array, ranked: int) -> None:
        rows, every = logits.numpy(), np.arange(len(logits))
        missing = -logits.shape[1] % SPREAD
        padded = functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits  # it would copy
        tops, heads, total = _summary(logits, padded)
        check_finite(total)
        here, own = np.arange(truth.shape[1]) < slots[:, None], rows[every, np.maximum(truth, 0).ravel()]
        self.total, self.score = total, integers(own, total).reshape(here.shape)
        peak = tops.max(1)
        highest = np.where(here, integers(peak, total).reshape(here.shape), -LOWEST)
        cost = (peak[:, None] - tops).reshape(*here.shape, -1)
        cost[~here] = np.inf
        # As many tokens come before the true one as there are groups with a better one, at least.
        ranks = np.where(truth < 0, -1, np.count_nonzero(tops > own[:, None], axis=1).reshape(here.shape))
        self.asked = candidates(cost, highest, ranks, self.score, LARGEST_TREE)
        # Lists reach as far as the last candidate needs them.
        lowest = np.where(self.asked, self.score.cumsum(1), 0).min(1)[:, None] - (highest.cumsum(1) - highest)
        least = np.where(here & self.asked[:, :1], total.reshape(here.shape) + lowest * UNIT - SLACK, np.inf)
        least = least.astype(np.float32)
        # And as far as the true token of a slot whose rank a chain or topk-K may ask for.
        going = so_far((truth >= 0) & (self.asked | (ranks < ranked)))
        least[going] = np.minimum(least, own.reshape(here.shape))[going]
        # A token without a chance (of a pruned vocabulary) has only equals: where one is asked for, everything is.
        hopeless = (self.asked & (self.score == -LOWEST)).any(1)
        least[here & hopeless[:, None]] = -np.inf
        # What is listed is in groups whose largest is.
        group = np.flatnonzero(heads >= least.reshape(-1, 1))
        row = group // heads.shape[1]
        members = padded.numpy().reshape(-1, GROUP).take(group, axis=0)
        if missing:
            members[(group % heads.shape[1] * GROUP)[:, None] + np.arange(GROUP) >= logits.shape[1]] = np.nan
        kept = np.flatnonzero(members >= least.ravel()[row][:, None])
        self.lists = Lists.gather(members.ravel()[kept], row[kept // GROUP], total, least)
        self.found["ranks"] = self._exact(rows, truth, ranks, going)

    def _exact(self, rows: Array, truth: Array, ranks: Array, going: Array) -> Array:
        """Ranks [R, L] of the true tokens, from lower bounds: right where they are `going`, which are listed."""
        at = np.flatnonzero(going)
        ranks.ravel()[at], alone = self.lists.places(at, self.score.ravel()[at])
        tied = at[~alone]  # or not told apart by their scores
        if len(tied):
            ranks.ravel()[tied] = _ranks(rows[tied], truth.ravel()[tied])
        return ranks


def judge_together(parts: Sequence[Read], verifiers: Sequence[Verifier], predict: bool = False) -> Judged:
    """The blocks of all parts, in order."""
    trees, predicted = [v for v in verifiers if v.kind == "ddtree"], {}
    found = {name: np.concatenate([part.found[name] for part in parts]) for name in parts[0].found}
    if trees:
        score, asked = (np.concatenate([getattr(part, name) for part in parts]) for name in ("score", "asked"))
        lists = Lists.together([part.lists for part in parts])
        found["pops"], unknown = numbers(lists, found["ranks"], score, asked, LARGEST_TREE)
        if unknown.any():
            raise AssertionError("a tree's list is shorter than its last candidate needs")
        if predict:
            sums = np.concatenate([part.sums for part in parts])
            predicted = {v.name: sums[:, column] for column, v in enumerate(trees)}
    return Judged(accepted_depths(verifiers, found), found.get("pops"), predicted)


def _summary(logits: Tensor, padded: Tensor) -> tuple[Array, Array, Array]:
    """Of each row of `logits` [M, V] (`padded` to whole groups): the largest of each group, tops [M, SPREAD] and heads
    [M, V / GROUP], and log Σ exp [M].
    """
    tops, heads = padded.unflatten(1, (-1, SPREAD)).amax(1), padded.unflatten(1, (-1, GROUP)).amax(2)
    # Of torch's ways to a normaliser the softmax is the fastest: its largest value is exp(peak - total).
    step = max(1, SCRATCH // (4 * logits.shape[1]))
    highest = torch.cat([torch.softmax(some, -1).amax(-1) for some in logits.split(step)])
    return tops.numpy(), heads.numpy(), (tops.amax(1) - highest.log()).numpy()


def _ranks(logits: Array, truth: Array) -> Array:
    """Rank [M] of `truth` [M] in the rows of `logits` [M, V], equal ones told apart by token id; -1 without one."""
    own = logits[np.arange(len(truth)), np.maximum(truth, 0)][:, None]
    ranks = np.count_nonzero(logits > own, axis=1)
    equal = logits == own
    for row in np.flatnonzero(np.count_nonzero(equal, axis=1) > 1):
        ranks[row] += np.count_nonzero(equal[row, : max(truth[row], 0)])
    return np.where(truth < 0, -1, ranks)
