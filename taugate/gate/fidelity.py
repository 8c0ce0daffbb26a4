"""Do the captured states belong to the cached completions? Asked before any τ is believed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from taugate.drafter.replay import CachedSequence


@dataclass(frozen=True)
class Fidelity:
    """On-policy rate: share of completion tokens that equal argmax(head · final_hidden) one position earlier.

    decided: tokens judged; agreed: those that matched; near_ties: tokens left out because the margin of the
    two best logits is below what the capture's noise can flip.
    """

    decided: int
    agreed: int
    near_ties: int

    @property
    def rate(self) -> float:
        return self.agreed / self.decided if self.decided else 0.0

    @property
    def near_tie_share(self) -> float:
        total = self.decided + self.near_ties
        return self.near_ties / total if total else 0.0

    def record(self) -> dict[str, Any]:
        return {"type": "fidelity", **asdict(self), "rate": self.rate, "near_tie_share": self.near_tie_share}


def on_policy(items: Iterable[tuple[CachedSequence, Tensor]], head: Tensor, noise: float) -> Fidelity:
    """Judge pairs of a sequence and its `final_hidden` [S, H] with the target's `head` [V, H].

    noise: relative error of a state that the path is allowed (served decode against captured prefill, bf16
    storage). A state error of that size in a random direction moves the difference of two logits by about
    noise · |h| · |w₁ − w₂| / √H; margins under three times that are near ties.
    """
    import torch

    decided = agreed = near = 0
    for sequence, final_hidden in items:
        positions = range(sequence.prompt_length - 1, sequence.last)
        hidden = final_hidden[positions.start : positions.stop].to(head.dtype)
        truth = torch.tensor(sequence.token_ids[positions.start + 1 : positions.stop + 1])
        values, ids = (hidden @ head.T).topk(2, dim=-1)
        apart = (head[ids[:, 0]] - head[ids[:, 1]]).norm(dim=-1) * hidden.norm(dim=-1) / hidden.shape[1] ** 0.5
        clear = values[:, 0] - values[:, 1] >= 3 * noise * apart
        decided += int(clear.sum())
        near += int((~clear).sum())
        agreed += int(((ids[:, 0] == truth) & clear).sum())
    return Fidelity(decided, agreed, near)
