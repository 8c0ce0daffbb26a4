"""Drafted blocks, and how deep each verifier accepts them once their true tokens' places are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from taugate.drafter.cached import Verifier
from taugate.errors import EvidenceError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Drafts:
    """R blocks of L drafted slots, all on one device.

    logits [R, L, V], of any floating dtype. truth [R, L] int64: true tokens, -1 past the end of the text or of the
    block. slots [R]: how many of the L slots were drafted. proposal [R, L]: what DFlash 2's selector chose; else the
    argmax.
    """

    logits: Tensor
    truth: Tensor
    slots: Tensor
    proposal: Tensor | None = None


@dataclass(frozen=True)
class Judged:
    """accepted: by verifier, depth [R]; arrivals [R, L]: pop numbers (see AnchorTable); predicted: by tree, [R]."""

    accepted: dict[str, Array]
    arrivals: Array | None = None
    predicted: dict[str, Array] = field(default_factory=dict)


def accepted_depths(verifiers: Sequence[Verifier], found: Mapping[str, Array]) -> dict[str, Array]:
    """Depth [R] by verifier, from what its kind asks for: `right` bool [R, L], where the proposal is the true token;
    `ranks` [R, L] of the true tokens, -1 without one; `pops` [R, L], the pop numbers of the true path.
    """
    accepted = {}
    for verifier in verifiers:
        if verifier.kind == "chain":
            accepted[verifier.name] = _run(found["right"])
        elif verifier.kind == "topk":
            accepted[verifier.name] = _run((found["ranks"] >= 0) & (found["ranks"] < verifier.size))
        else:
            accepted[verifier.name] = (found["pops"] <= verifier.size).sum(1)
    return accepted


def _run(ok: Array) -> Array:
    """Length [R] of the leading run of True in each row of `ok` [R, L]."""
    return np.logical_and.accumulate(ok, axis=1).sum(1)


def check_finite(total: Array) -> None:
    """Raises EvidenceError unless all `total`, log Σ exp of logits, are finite."""
    if not np.isfinite(total).all():
        raise EvidenceError("the drafter's logits are not finite; its weights or the states are damaged")
