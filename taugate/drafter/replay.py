"""Exact chained acceptance from cached states: no target is run, because at T=0 accepted text equals cached
text.

An anchor is a position whose token is known and whose state is not: a block drafted there sees the states of
all positions strictly before it, and slot k predicts the token at anchor + k. Two modes with equal results:
`anchor_table` drafts a block at *every* position of a completion and notes how far each verifier accepts it,
so that `walk` follows any verifier's chain; `walk_together` drafts only where one verifier's chain goes, many
prompts at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from taugate.drafter.cached import AnchorTable, CachedSequence, Cycle, Verifier, walk

if TYPE_CHECKING:
    from torch import Tensor

    from taugate.drafter.judge import Drafts, Judged
    from taugate.drafter.model import Drafter, KeyValue

__all__ = ["AnchorTable", "CachedSequence", "Cycle", "Verifier", "anchor_table", "walk", "walk_together"]


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

    taps: [S, K·H] tapped states of all positions, concatenated in the drafter's order; embedding, head: [V,
    H]. predict: also note what the drafter itself expects of each tree. Memory is bounded by
    `anchors_per_batch`. final_hidden: [S, H] target states after the final norm: with them, acceptance Σ
    min(p, q) at `temperature` too.
    """
    import torch

    from taugate.drafter.judge import judge, overlaps

    parts: list[Judged] = []
    overlap: list[tuple[float, ...]] = []
    with torch.inference_mode():
        context = drafter.context(taps[None])
        for first in range(0, len(sequence.anchors()), anchors_per_batch):
            anchors = list(sequence.anchors()[first : first + anchors_per_batch])
            drafts = _draft(
                drafter, context, [(sequence, a) for a in anchors], torch.tensor([anchors]), embedding, head
            )
            if final_hidden is not None:
                overlap += overlaps(drafts, anchors, final_hidden, head, temperature)
            parts.append(judge(drafts, verifiers, predict))
    accepted = {v.name: tuple(d for part in parts for d in part.accepted[v.name].tolist()) for v in verifiers}
    arrivals = tuple(tuple(row) for part in parts if part.arrivals is not None for row in part.arrivals.tolist())
    predicted = {
        v.name: tuple(q for part in parts for q in part.predicted[v.name].tolist())
        for v in verifiers
        if predict and v.kind == "ddtree"
    }
    return AnchorTable(sequence, accepted, arrivals, predicted, tuple(overlap))


def walk_together(
    drafter: Drafter,
    items: Iterable[tuple[CachedSequence, Tensor]],
    embedding: Tensor,
    head: Tensor,
    verifier: Verifier,
    prompts_per_batch: int = 64,
) -> Iterator[tuple[CachedSequence, list[Cycle]]]:
    """Follow one verifier's chain through every sequence, in order; the prompts of a batch advance together.

    items: sequences with their taps [S, K·H], read as they are needed: memory is bounded by
    `prompts_per_batch`.
    """
    stream = iter(items)
    while group := list(islice(stream, prompts_per_batch)):
        sequences = [sequence for sequence, _ in group]
        cycles = _advance(drafter, sequences, [taps for _, taps in group], embedding, head, verifier)
        yield from zip(sequences, cycles, strict=True)


def _advance(
    drafter: Drafter,
    sequences: list[CachedSequence],
    taps: list[Tensor],
    embedding: Tensor,
    head: Tensor,
    verifier: Verifier,
) -> list[list[Cycle]]:
    """Chains of one batch: each step drafts one block for every sequence that has not ended."""
    import torch

    from taugate.drafter.judge import judge

    cycles: list[list[Cycle]] = [[] for _ in sequences]
    place = [sequence.prompt_length for sequence in sequences]
    live = [n for n, sequence in enumerate(sequences) if place[n] < sequence.last]
    with torch.inference_mode():
        # Positions past a sequence's own end are padding; every anchor lies before them, so none is ever
        # seen.
        padded = torch.nn.utils.rnn.pad_sequence([taps[n] for n in live], batch_first=True) if live else None
        context = drafter.context(padded) if live else []
        while live:
            anchors = torch.tensor([[place[n]] for n in live])
            where = [(sequences[n], place[n]) for n in live]
            drafts = _draft(drafter, context, where, anchors, embedding, head)
            found = judge(drafts, [verifier]).accepted[verifier.name]
            for n, accepted in zip(live, found.tolist(), strict=True):
                emitted = min(accepted + 1, sequences[n].last - place[n])
                cycles[n].append(Cycle(place[n], emitted, accepted))
                place[n] += emitted
            going = [row for row, n in enumerate(live) if place[n] < sequences[n].last]
            if len(going) < len(live):
                live = [live[row] for row in going]
                rows = torch.tensor(going, dtype=torch.long, device=embedding.device)
                context = [(key[rows], value[rows]) for key, value in context] if live else []
    return cycles


def _draft(
    drafter: Drafter,
    context: list[KeyValue],
    where: Sequence[tuple[CachedSequence, int]],
    anchors: Tensor,
    embedding: Tensor,
    head: Tensor,
) -> Drafts:
    """Draft one block at each place; `anchors` [N, A] are the places of `where`, in order."""
    import numpy as np
    import torch

    from taugate.drafter.judge import Drafts

    full, device, shape = drafter.config.block_size, embedding.device, anchors.shape
    sizes = torch.tensor([sequence.block_size(anchor, full) for sequence, anchor in where])
    tokens = torch.tensor([sequence.token_ids[anchor] for sequence, anchor in where]).to(device)
    truth = np.full((len(where), full - 1), -1)
    for row, (sequence, anchor) in enumerate(where):
        tail = sequence.truth(anchor, full)
        truth[row, : len(tail)] = tail
    # No block sees a state at or after its own anchor, so later ones need not even be looked at.
    stop = max(anchor for _, anchor in where)
    context = [(key[..., :stop, :], value[..., :stop, :]) for key, value in context]
    hidden = drafter(context, tokens.view(shape), anchors.to(device), sizes.view(shape).to(device), embedding)
    hidden = hidden.flatten(0, 1)[:, 1:]
    logits = drafter.logits(hidden, head).float()
    proposal = drafter.propose(hidden, logits, tokens) if drafter.config.dflash2 else None
    return Drafts(logits, truth, sizes.numpy() - 1, proposal)
