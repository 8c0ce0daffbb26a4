"""Exact chained acceptance from cached states: no target is run, because at T=0 accepted text equals cached
text.

An anchor is a position whose token is known and whose state is not: a block drafted there sees the states of
all positions strictly before it, and slot k predicts the token at anchor + k. Two modes with equal results:
`anchor_table` drafts a block at *every* position of a completion and notes how far each verifier accepts it,
so that `walk` follows any verifier's chain; `walk_together` drafts only where one verifier's chain goes, many
prompts at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from taugate.drafter.cached import AnchorTable, CachedSequence, Cycle, Verifier, walk
from taugate.errors import EvidenceError

if TYPE_CHECKING:
    from torch import Tensor

    from taugate.drafter.context import Context
    from taugate.drafter.judge import Drafts
    from taugate.drafter.model import Drafter
    from taugate.drafter.texts import Texts

__all__ = ["AnchorTable", "CachedSequence", "Cycle", "Verifier", "anchor_table", "walk", "walk_together"]


def blocks_together(like: Tensor, anchors_per_batch: int) -> int:
    """Blocks of a sequence whose attention is one call: each passes over the keys of all of them, which costs little
    beside more calls on a GPU, and more on a CPU.
    """
    return min(16 if like.is_cuda else 8, anchors_per_batch)


def anchor_table(
    drafter: Drafter,
    sequence: CachedSequence,
    taps: Tensor,
    embedding: Tensor,
    head: Tensor,
    verifiers: Sequence[Verifier],
    anchors_per_batch: int = 32,
    predict: bool = False,
    final_hidden: Tensor | None = None,
    temperature: float = 1.0,
) -> AnchorTable:
    """Draft at every anchor of `sequence` and judge each block against the cached text.

    taps: [S, K·H] tapped states of all positions, concatenated in the drafter's order, of any floating dtype and on any
    device; embedding, head: [V, H], on the drafter's device and of its dtype. predict: also note what the drafter
    itself expects of each tree. final_hidden: [S, H] target states after the final norm: with them, acceptance
    Σ min(p, q) at `temperature` too. Memory is bounded by `anchors_per_batch`: logits of two batches are held at a
    time (see `judgements`), because the host judges one while the device drafts the next. Raises
    EvidenceError for logits that are not finite.
    """
    import torch

    from taugate.drafter.judge import judgements, overlaps
    from taugate.drafter.texts import Texts

    overlap: list[tuple[float, ...]] = []
    everywhere = sequence.anchors()

    def drafted() -> Iterator[Drafts]:
        context = drafter.context(taps[None].to(embedding), blocks_together(embedding, anchors_per_batch))
        texts = Texts.of([sequence], embedding.device)
        for first in range(0, len(everywhere), anchors_per_batch):
            some = everywhere[first : first + anchors_per_batch]
            anchors = torch.arange(some.start, some.stop, device=embedding.device)[None]
            drafts = _draft(drafter, context, texts, anchors, embedding, head, (some[0], some[-1]))
            if final_hidden is not None:
                overlap.extend(overlaps(drafts, some[0], final_hidden, head, temperature))
            yield drafts

    with torch.inference_mode():
        parts = list(judgements(drafted(), verifiers, predict))
    accepted = {v.name: tuple(d for part in parts for d in part.accepted[v.name].tolist()) for v in verifiers}
    arrivals = tuple(tuple(row) for part in parts if part.arrivals is not None for row in part.arrivals.tolist())
    predicted = {
        v.name: tuple(q for part in parts for q in part.predicted[v.name].tolist())
        for v in verifiers
        if predict and v.kind == "ddtree"
    }
    return AnchorTable(sequence, accepted, arrivals, predicted, tuple(overlap), temperature if overlap else None)


def walk_together(
    drafter: Drafter,
    items: Iterable[tuple[CachedSequence, Tensor]],
    embedding: Tensor,
    head: Tensor,
    verifier: Verifier,
    prompts_per_batch: int = 64,
) -> Iterator[tuple[CachedSequence, list[Cycle]]]:
    """Follow one verifier's chain through every sequence, in order; the prompts of a batch advance together.

    items: sequences with their taps [S, K·H], read one by one and dropped once they are keys and values: memory is
    bounded by `prompts_per_batch`. Raises EvidenceError for states or weights that give no finite numbers.
    """
    import torch

    stream = iter(items)
    while True:
        sequences: list[CachedSequence] = []
        parts: list[Context] = []
        with torch.inference_mode():
            for sequence, taps in islice(stream, prompts_per_batch):
                sequences.append(sequence)
                if sequence.anchors():
                    parts.append(drafter.context(taps[None].to(embedding)))
            if not sequences:
                return
            drafted = [sequence for sequence in sequences if sequence.anchors()]
            cycles = iter(_advance(drafter, drafted, parts, embedding, head, verifier) if drafted else [])
        for sequence in sequences:
            yield sequence, next(cycles) if sequence.anchors() else []


def _advance(
    drafter: Drafter,
    sequences: list[CachedSequence],
    parts: list[Context],
    embedding: Tensor,
    head: Tensor,
    verifier: Verifier,
) -> list[list[Cycle]]:
    """Chains of one batch: each step drafts one block for every sequence that has not ended.

    Anchors stay on the device. A GPU is given the next step before the host has seen the last one's result, so the host
    knows where each sequence was one step ago; those that have ended meanwhile draft once more, for nothing.
    """
    import torch

    from taugate.drafter.context import Context
    from taugate.drafter.device import Fetched
    from taugate.drafter.judge import chain_depth, judge
    from taugate.drafter.texts import Texts

    device, block = embedding.device, drafter.config.block_size
    cycles: list[list[Cycle]] = [[] for _ in sequences]
    place = [sequence.prompt_length for sequence in sequences]
    # Completions begin at one index, so that sequences of different lengths look at the same stretch.
    shifts = [max(place) - begin for begin in place]
    context, texts = Context.together(parts, shifts), Texts.of(sequences, device)
    anchors = torch.tensor(place, device=device)[:, None]
    live = list(range(len(sequences)))
    flying: deque[tuple[list[int], Fetched]] = deque()
    while live or flying:
        if live:
            indices = [shifts[n] + place[n] for n in live]
            between = min(indices), max(indices) + block * len(flying)
            drafts = _draft(drafter, context, texts, anchors, embedding, head, between)
            if verifier.kind == "chain":
                depth = chain_depth(drafts)
            else:
                depth = torch.from_numpy(judge(drafts, [verifier]).accepted[verifier.name]).to(device)
            emitted = torch.minimum(depth + 1, texts.last - anchors[:, 0])
            sound = ~drafts.logits[:, 0, 0].isnan()
            flying.append((live, Fetched(step=torch.stack([anchors[:, 0], emitted, depth, sound]))))
            anchors = anchors + emitted[:, None]
        if live and len(flying) <= (device.type == "cuda"):
            continue
        names, fetched = flying.popleft()
        for n, start, count, accepted, sound in zip(names, *fetched["step"].tolist(), strict=True):
            if not sound:
                raise EvidenceError(
                    f"prompt {sequences[n].prompt_id}: the drafter's logits are not finite; its weights or the states "
                    "are damaged"
                )
            if count:
                cycles[n].append(Cycle(start, count, accepted))
                place[n] = start + count
        going = [row for row, n in enumerate(live) if place[n] < sequences[n].last]
        if len(going) <= len(live) * 7 // 8:  # leaving out the few that have ended would copy all the others
            live = [live[row] for row in going]
            keep = torch.tensor(going, dtype=torch.long, device=device)
            context, texts, anchors = context.rows(keep), texts.rows(keep), anchors[keep]
    return cycles


def _draft(
    drafter: Drafter,
    context: Context,
    texts: Texts,
    anchors: Tensor,
    embedding: Tensor,
    head: Tensor,
    between: tuple[int, int],
) -> Drafts:
    """Draft one block at each of `anchors` [N, A]; `between`: see Drafter."""
    from taugate.drafter.judge import Drafts

    full = drafter.config.block_size
    known, sizes = texts.known(anchors), texts.sizes(anchors, full)
    hidden = drafter(context, known, anchors, sizes, embedding, between).flatten(0, 1)[:, 1:]
    logits = drafter.logits(hidden, head)
    proposal = drafter.propose(hidden, logits, known.flatten()) if drafter.config.dflash2 else None
    return Drafts(logits, texts.truth(anchors, full).flatten(0, 1), sizes.flatten() - 1, proposal)
