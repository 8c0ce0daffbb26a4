"""How far apart two tensors are, in the unit in which rounding is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taugate.errors import EvidenceError

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1.66e-3
"""f: relative RMS error of rounding once to bfloat16, 2⁻⁸/√3 · √(3 / (8 ln 2)) for log-uniform magnitudes."""


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference over that of the reference, computed in float64.

    Raises EvidenceError for different shapes, for values that are not finite, and for a reference of zeros.
    """
    if value.shape != reference.shape:
        raise EvidenceError(f"tensors of shapes {list(value.shape)} and {list(reference.shape)} cannot be compared")
    wide, base = value.double(), reference.double()
    if not (wide.isfinite().all() and base.isfinite().all()):
        raise EvidenceError("a tensor holds values that are not finite; no error can be stated")
    size = float(base.norm())
    if size == 0:
        raise EvidenceError("the reference is all zeros; a relative error has no meaning")
    return float((wide - base).norm()) / size


def in_roundings(error: float) -> float:
    """A relative error in units of f: 1 is what storing a tensor in bfloat16 costs."""
    return error / ROUNDING
