"""Exact chained acceptance from cached states: no target is run, because at T=0 accepted text equals cached text.

An anchor is a position whose token is known and whose state is not: a block drafted there sees the states of all
positions strictly before it, and slot k predicts the token at anchor + k. `anchor_table` drafts a block at *every*
position of the completion and notes how far each verifier would accept it; `walk` then follows one verifier's chain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taugate.drafter.tree import accepted_depths
from taugate.errors import EvidenceError

if TYPE_CHECKING:
    from torch import Tensor

    from taugate.drafter.model import Drafter

_VERIFIER = re.compile(r"(chain)|(ddtree|topk)-([1-9]\d*)")


@dataclass(frozen=True)
class Verifier:
    """`chain`, `ddtree-N` (best-first tree of N nodes, root excluded) or `topk-K` (an upper bound, not a tree)."""

    name: str
    kind: str
    size: int

    @classmethod
    def parse(cls, name: str) -> Verifier:
        """Raises EvidenceError for a name that is none of the three."""
        found = _VERIFIER.fullmatch(name)
        if not found:
            raise EvidenceError(f"verifier {name!r} is unknown; it is chain, ddtree-N or topk-K")
        return cls(name, found[1] or found[2], int(found[3] or 1))

    @property
    def definition(self) -> str:
        what = {
            "chain": "longest prefix of the argmax block",
            "ddtree": f"best-first tree over the slot marginals, {self.size} nodes besides the root",
            "topk": f"the true token is among the {self.size} best of each slot; upper bound for trees of that width",
        }[self.kind]
        return f"emitted tokens / cycles, chained, pooled, greedy, bonus token counted, prefill token not; {what}"


@dataclass(frozen=True)
class CachedSequence:
    """Prompt and greedy completion of one prompt, as token ids.

    prompt_length: position of the first completion token (the prefill's, already known when drafting starts).
    cap: prompt_length + max_new_tokens; blocks shrink to what is left below it, as in the public implementation.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    prompt_length: int
    cap: int
    tags: tuple[str, ...] = ()

    @property
    def last(self) -> int:
        """Index of the last token: the end-of-text token or the one at the length cap."""
        return len(self.token_ids) - 1

    def anchors(self) -> range:
        """Every position at which a cycle can start."""
        return range(self.prompt_length, self.last)

    def block_size(self, anchor: int, full: int) -> int:
        """Slots of the block drafted at `anchor`, anchor included: `full`, or what is left below the cap."""
        return min(full, self.cap - anchor)


@dataclass(frozen=True)
class AnchorTable:
    """Accepted drafted tokens (bonus not counted) at every anchor of one sequence, by verifier."""

    sequence: CachedSequence
    accepted: dict[str, tuple[int, ...]]

    def emitted(self, verifier: str, anchor: int) -> int:
        """Tokens that a cycle at `anchor` emits: accepted ones and the bonus token, cut at the sequence's end."""
        accepted = self.accepted[verifier][anchor - self.sequence.prompt_length]
        return min(accepted + 1, self.sequence.last - anchor)


@dataclass(frozen=True)
class Cycle:
    """One drafting and verification: where it started and how many tokens it emitted (1…block size)."""

    anchor: int
    emitted: int


def walk(table: AnchorTable, verifier: str) -> list[Cycle]:
    """The chain of cycles that decoding with this verifier would have gone through."""
    cycles, anchor = [], table.sequence.prompt_length
    while anchor < table.sequence.last:
        cycles.append(Cycle(anchor, table.emitted(verifier, anchor)))
        anchor += cycles[-1].emitted
    return cycles


def anchor_table(
    drafter: Drafter,
    sequence: CachedSequence,
    taps: Tensor,
    embedding: Tensor,
    head: Tensor,
    verifiers: Sequence[Verifier],
    anchors_per_batch: int = 64,
) -> AnchorTable:
    """Draft at every anchor of `sequence` and judge each block against the cached text.

    taps: [S, K·H] tapped states of all positions, concatenated in the drafter's order; embedding, head: [V, H].
    """
    import torch

    accepted: dict[str, list[int]] = {verifier.name: [] for verifier in verifiers}
    full = drafter.config.block_size
    tokens = torch.tensor(sequence.token_ids)
    with torch.inference_mode():
        context = drafter.context(taps[None])
        for anchors in torch.tensor(list(sequence.anchors()), dtype=torch.long).split(anchors_per_batch):
            sizes = torch.tensor([sequence.block_size(a, full) for a in anchors.tolist()])
            hidden = drafter(context, tokens[anchors][None], anchors[None], sizes[None], embedding)
            logits = drafter.logits(hidden[0, :, 1:], head).float()
            for anchor, size, block in zip(anchors.tolist(), sizes.tolist(), logits, strict=True):
                truth = tokens[anchor + 1 : min(anchor + size, sequence.last + 1)]
                for name, depth in _judge(block[: size - 1], truth, verifiers).items():
                    accepted[name].append(depth)
    return AnchorTable(sequence, {name: tuple(depths) for name, depths in accepted.items()})


def _judge(block: Tensor, truth: Tensor, verifiers: Sequence[Verifier]) -> dict[str, int]:
    """Accepted depth by verifier for one block: logits [slots, V] against the true tokens [≤ slots]."""
    slots = block[: len(truth)]
    own = slots.gather(1, truth[:, None])
    # Rank of the true token; equal logits are ranked by token id, as argmax and a stable sort do.
    before = (slots > own) | ((slots == own) & (_ids(slots) < truth[:, None]))
    ranks = before.sum(1).tolist()
    depths = {}
    budgets = [verifier.size for verifier in verifiers if verifier.kind == "ddtree"]
    if budgets:
        width = min(max(budgets), block.shape[1])
        best = block.log_softmax(-1).sort(dim=-1, descending=True, stable=True).values[:, :width].tolist()
        trees = iter(accepted_depths(best, ranks, budgets))
    for verifier in verifiers:
        depths[verifier.name] = next(trees) if verifier.kind == "ddtree" else _prefix(ranks, verifier.size)
    return depths


def _prefix(ranks: Sequence[int], width: int) -> int:
    """Length of the longest prefix whose tokens all rank among the first `width`."""
    return next((depth for depth, rank in enumerate(ranks) if rank >= width), len(ranks))


def _ids(slots: Tensor) -> Tensor:
    import torch

    return torch.arange(slots.shape[1], device=slots.device)
