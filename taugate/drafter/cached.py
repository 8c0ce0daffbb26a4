"""A cached completion, how a verifier judges a block drafted in it, and the chain of cycles that follows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from taugate.errors import EvidenceError

_VERIFIER = re.compile(r"(chain)|(ddtree|topk)-([1-9]\d*)")
LARGEST_TREE = 1024


@dataclass(frozen=True)
class Verifier:
    """`chain`, `ddtree-N` (best-first tree of N nodes, root excluded) or `topk-K` (an upper bound, not a
    tree).
    """

    name: str
    kind: str
    size: int

    @classmethod
    def parse(cls, name: str) -> Verifier:
        """Raises EvidenceError for a name that is none of the three, and for a tree of more than 1024
        nodes.
        """
        found = _VERIFIER.fullmatch(name)
        if not found:
            raise EvidenceError(f"verifier {name!r} is unknown; it is chain, ddtree-N or topk-K")
        kind, size = found[1] or found[2], int(found[3] or 1)
        if kind == "ddtree" and size > LARGEST_TREE:
            raise EvidenceError(f"verifier {name!r} asks for {size} nodes; trees of up to {LARGEST_TREE} are measured")
        return cls(name, kind, size)

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
    cap: prompt_length + max_new_tokens; blocks shrink to what is left below it, as in the public
    implementation.
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

    def truth(self, anchor: int, full: int) -> tuple[int, ...]:
        """The tokens that the drafted slots 1, 2, … of a block at `anchor` are compared with, to the text's
        end.
        """
        return self.token_ids[anchor + 1 : anchor + self.block_size(anchor, full)]


@dataclass(frozen=True)
class Cycle:
    """One drafting and verification: where it started, how many drafted tokens matched, how many tokens it
    emitted.
    """

    anchor: int
    emitted: int
    accepted: int


@dataclass(frozen=True)
class AnchorTable:
    """Accepted drafted tokens (bonus not counted) at every anchor of one sequence, by verifier.

    arrivals: per anchor, the pop number of each prefix of the true continuation (1025 if beyond every tree),
    when trees were asked for: any `ddtree-N` can be read from it. predicted: per tree, Σ q(u) at each anchor.
    overlap: per anchor and slot Σ min(p, q) at `temperature`, where target probabilities were given.
    """

    sequence: CachedSequence
    accepted: Mapping[str, tuple[int, ...]]
    arrivals: tuple[tuple[int, ...], ...] = ()
    predicted: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    overlap: tuple[tuple[float, ...], ...] = ()
    temperature: float | None = None

    def depth(self, verifier: str, anchor: int) -> int:
        """Drafted tokens that match at `anchor`.

        Raises EvidenceError for a verifier that was not asked for.
        """
        row = anchor - self.sequence.prompt_length
        if verifier in self.accepted:
            return self.accepted[verifier][row]
        wanted = Verifier.parse(verifier)
        if wanted.kind != "ddtree" or not self.arrivals:
            raise EvidenceError(
                f"the table of {self.sequence.prompt_id} was made without {verifier}; ask for it in the replay"
            )
        return sum(number <= wanted.size for number in self.arrivals[row])

    def emitted(self, verifier: str, anchor: int) -> int:
        """Tokens that a cycle at `anchor` emits: accepted ones and the bonus token, cut at the sequence's
        end.
        """
        return min(self.depth(verifier, anchor) + 1, self.sequence.last - anchor)


def walk(table: AnchorTable, verifier: str) -> list[Cycle]:
    """The chain of cycles that decoding with this verifier would have gone through."""
    cycles, anchor = [], table.sequence.prompt_length
    while anchor < table.sequence.last:
        cycles.append(Cycle(anchor, table.emitted(verifier, anchor), table.depth(verifier, anchor)))
        anchor += cycles[-1].emitted
    return cycles
