"""How far apart two tensors are, in the unit in which rounding is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taugate.errors import EvidenceError

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1.66e-3
"""f: relative RMS error of rounding once to bfloat16, 2⁻⁸/√3 · √(3 / (8 ln 2)) for log-uniform magnitudes."""


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference over that of the reference, computed in float64.

    Raises EvidenceError for different shapes, for values that are not finite, and for a reference of zeros.
    """
    wide, base = _checked(value, reference)
    return float((wide - base).norm()) / float(base.norm())


def in_roundings(error: float) -> float:
    """A relative error in units of f: 1 is what storing a tensor in bfloat16 costs."""
    return error / ROUNDING


@dataclass(frozen=True)
class TokenError:
    """The token that is furthest off: its index in its sequence, and its error over the RMS of all tokens' norms."""

    error: float
    index: int


def token_maximum(value: Tensor, reference: Tensor, dim: int = 1) -> TokenError:
    """max over tokens of ‖Δ_t‖ / √(mean ‖r_t‖²), `dim` being the tokens and dimension 0 the sequences.

    Normalised by all tokens and not by the token itself: a correct kernel has 8e-2 where q and k nearly cancel.
    Raises EvidenceError as `relative_error`.
    """
    wide, base = _checked(value, reference)
    apart, size = ((x.movedim(dim, 1).flatten(2).norm(dim=-1)) for x in (wide - base, base))
    share = apart / size.square().mean().sqrt()
    worst = int(share.argmax())
    return TokenError(float(share.flatten()[worst]), worst % share.shape[1])


def cosine_gap(value: Tensor, reference: Tensor) -> float:
    """Largest 1 − cos between vectors of the last dimension. Reported only: it is half the squared error."""
    import torch

    wide, base = _checked(value, reference)
    return float((1 - torch.nn.functional.cosine_similarity(wide, base, dim=-1)).max())


def error_ratio(error: float, other: float) -> float:
    """e_A / e_B of two paths against the same reference: near 1 both only round, far from 1 one of them is wrong."""
    if other <= 0:
        raise EvidenceError("the error of the path to compare with is zero; a ratio has no meaning")
    return error / other


def repeatable(run: Callable[[], Any], times: int = 3) -> bool:
    """Whether `run`, which returns a tensor or a tuple of tensors, gives the same bits every time; NaN equals NaN."""
    import torch

    def bits(result: Any) -> list[Tensor]:
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        return [t.contiguous().view(torch.uint8).clone() for t in tensors]

    first = bits(run())
    return all(
        all(torch.equal(x, y) for x, y in zip(first, bits(run()), strict=True)) for _ in range(times - 1)
    )


def first_above(errors: list[float], limit: float) -> int | None:
    """Index of the first layer whose error exceeds the limit, None if none does."""
    return next((index for index, error in enumerate(errors) if not error <= limit), None)


def logit_kl(logits: Tensor, reference: Tensor) -> float:
    """Mean over positions of KL(reference ‖ path) in nats, from logits [T, vocabulary], computed in float64."""
    import torch

    wide, base = _checked(logits, reference)
    ours, theirs = (torch.log_softmax(x, dim=-1) for x in (wide, base))
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@dataclass(frozen=True)
class TopOne:
    """How often the argmax agrees: over all positions, over those decided beyond the noise, and flips beyond it."""

    same: float
    decided: int
    flips: int


def top_one(logits: Tensor, reference: Tensor, margin: float) -> TopOne:
    """Margin-aware top-1: a flip counts where the reference's top two logits are more than `margin` apart."""
    wide, base = _checked(logits, reference)
    best = base.topk(2, dim=-1)
    clear = (best.values[..., 0] - best.values[..., 1]) > margin
    same = wide.argmax(-1) == best.indices[..., 0]
    return TopOne(float(same.double().mean()), int(clear.sum()), int((clear & ~same).sum()))


def _checked(value: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, or EvidenceError: nothing may be said of shapes that differ, of NaN or of zeros."""
    if value.shape != reference.shape:
        raise EvidenceError(f"tensors of shapes {list(value.shape)} and {list(reference.shape)} cannot be compared")
    wide, base = value.double(), reference.double()
    if not (wide.isfinite().all() and base.isfinite().all()):
        raise EvidenceError("a tensor holds values that are not finite; no error can be stated")
    if not base.any():
        raise EvidenceError("the reference is all zeros; a relative error has no meaning")
    return wide, base
