"""What lies behind a τ: how long runs are, where they end, how the drafter's own expectation compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from taugate.drafter.cached import AnchorTable, walk


@dataclass(frozen=True)
class Profile:
    """Of all cycles of a chain; a slot is counted from 1, the first drafted token.

    histogram: cycles that emitted 1, 2, … block-size tokens.
    tried, matched: per slot, cycles in which all earlier slots matched and the text goes on, and those that
    matched there too; their ratio is the conditional acceptance.
    shrunk: cycles whose block was drafted short because of the length cap; cut: cycles that the end of the
    text cut. whole, full: cycles that were neither, and those of them that emitted a full block.
    predicted: for a tree, 1 + Σ q(u), what the drafter itself expects, mean over cycles that are whole;
    realised: the mean that they emitted. overlap: Σ min(p, q) per slot at `temperature`, mean over all anchors,
    where target states were given; sampled: the tokens that a cycle of rejection sampling emits then, 1 + Σ_k Π_{j≤k}
    of it, mean over all anchors with whole blocks: each slot after the greedy text, since no other is cached.
    """

    histogram: tuple[int, ...]
    tried: tuple[int, ...]
    matched: tuple[int, ...]
    shrunk: int
    cut: int
    whole: int
    full: int
    predicted: float | None = None
    realised: float | None = None
    overlap: tuple[float, ...] = ()
    sampled: float | None = None
    temperature: float | None = None

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """P(slot k matches | slots 1…k-1 match), None where that never came up."""
        return tuple(m / t if t else None for m, t in zip(self.matched, self.tried, strict=True))


def profile(tables: Sequence[AnchorTable], verifier: str, block_size: int) -> Profile:
    """Profile of the chains that `verifier` walks through `tables`."""
    lengths: Counter[int] = Counter()
    tried, matched = [0] * (block_size - 1), [0] * (block_size - 1)
    shrunk = cut = whole = full = 0
    expected, realised = [], []
    for table in tables:
        sequence = table.sequence
        for cycle in walk(table, verifier):
            lengths[cycle.emitted] += 1
            offered = len(sequence.truth(cycle.anchor, block_size))
            for slot in range(min(cycle.accepted + 1, offered)):
                tried[slot] += 1
                matched[slot] += slot < cycle.accepted
            short = sequence.block_size(cycle.anchor, block_size) < block_size
            ended = cycle.accepted + 1 > sequence.last - cycle.anchor
            shrunk, cut = shrunk + short, cut + ended
            if not short and not ended:
                whole, full = whole + 1, full + (cycle.emitted == block_size)
                if verifier in table.predicted:
                    expected.append(1 + table.predicted[verifier][cycle.anchor - sequence.prompt_length])
                    realised.append(cycle.emitted)
    return Profile(
        histogram=tuple(lengths[n] for n in range(1, block_size + 1)),
        tried=tuple(tried),
        matched=tuple(matched),
        shrunk=shrunk,
        cut=cut,
        whole=whole,
        full=full,
        predicted=_mean(expected),
        realised=_mean(realised),
        overlap=_overlap(tables),
        sampled=_sampled(tables, block_size),
        temperature=next((table.temperature for table in tables if table.overlap), None),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _overlap(tables: Iterable[AnchorTable]) -> tuple[float, ...]:
    """Mean Σ min(p, q) of each slot; a row ends where its text does."""
    rows = [row for table in tables for row in table.overlap]
    slots = max(map(len, rows), default=0)
    return tuple(sum(r[k] for r in rows if len(r) > k) / sum(len(r) > k for r in rows) for k in range(slots))


def _sampled(tables: Iterable[AnchorTable], block_size: int) -> float | None:
    """Tokens per cycle under rejection sampling, from the blocks that neither cap nor text cuts."""
    whole = [row for table in tables for row in table.overlap if len(row) == block_size - 1]
    return _mean([1 + sum(accumulate(row, mul)) for row in whole])
