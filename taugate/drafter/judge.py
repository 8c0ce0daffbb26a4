"""How deep each verifier accepts the blocks of a batch, given their logits and the true tokens.

Equal logits are ranked by token id, lower first, as argmax and a stable sort do. On a GPU, judging runs beside the
drafting of the next batch (`gpujudge`); on the host, many batches are judged together (`hostjudge`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from taugate.drafter.cached import Verifier
from taugate.drafter.drafts import Drafts, Judged
from taugate.drafter.gpujudge import Condensed, gpu_right
from taugate.drafter.hostjudge import Read, host_right, judge_together
from taugate.errors import EvidenceError

TOGETHER = 512  # blocks whose trees are counted at a time on the host


def chain_depth(drafts: Drafts) -> Tensor:
    """Length [R] of the proposal's leading run of true tokens, on the drafts' device."""
    right = gpu_right(drafts) if drafts.logits.is_cuda else host_right(drafts)
    return right.int().cumprod(1).sum(1)


def judge(drafts: Drafts, verifiers: Sequence[Verifier], predict: bool = False) -> Judged:
    """Judge every block by every verifier; predict: also note what the drafter itself expects of each tree.

    Raises EvidenceError for logits that are not finite.
    """
    (judged,) = judgements([drafts], verifiers, predict)
    return judged


def judgements(batches: Iterable[Drafts], verifiers: Sequence[Verifier], predict: bool = False) -> Iterator[Judged]:
    """Judge batches as they are drafted; blocks in order, however they are put together.

    On a GPU, the logits of one batch are held beside those of the next; on the host, short lists are held.
    """
    waiting: Condensed | None = None
    read: list[Read] = []
    for drafts in batches:
        if drafts.logits.is_cuda:
            condensed = Condensed(drafts, verifiers, predict)
            if waiting:
                yield waiting.judge()
            waiting = condensed
            continue
        read.append(Read(drafts, verifiers, predict))
        if len(read) * len(drafts.slots) >= TOGETHER:
            yield judge_together(read, verifiers, predict)
            read = []
    if waiting:
        yield waiting.judge()
    if read:
        yield judge_together(read, verifiers, predict)


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
