"""How far a path is from the float64 reference at each level of a model, and whether that is within its budgets.

layer: every layer is fed what the reference fed it, rounded to the path's precision, and is compared with the
reference on that same rounded input, so that nothing but the layer's own arithmetic counts; the token mixer alone
(`mixer`), where nothing hides behind the residual, and the whole layer (`output`). propagated: the path runs freely and
its error piles up. logits: what is left of it in the distribution of the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from taugate.errors import EvidenceError
from taugate.numerics.budgets import Agreement, Budgets, check
from taugate.numerics.measures import (
    TokenError,
    TopOne,
    error_ratio,
    in_roundings,
    logit_kl,
    relative_error,
    token_maximum,
    top_one,
)
from taugate.target.trace import Trace, trace

if TYPE_CHECKING:
    from torch import Tensor

    from taugate.target.reference import Reference

DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
MARGIN = 6.0
"""Top-1 counts where the reference's two best logits are this many times the RMS error of a logit apart: an error of
that size in both moves their difference by √2 of it, so that 6 are 4.2 standard deviations.
"""


@dataclass(frozen=True)
class Batch:
    """Token ids [B, T] and their mask [B, T] (0 at pads), None when there are no pads; fed in `pieces` if given."""

    token_ids: Sequence[Sequence[int]]
    mask: Tensor | None = None
    pieces: Sequence[int] | None = None


@dataclass(frozen=True)
class Divergence:
    """Relative errors of one path against the reference, pooled over all tokens that are no pads; one per layer.

    token: the mixers' worst token, with its layer in `token_layer`. logit_rms, kl (nats) and top: None without a head.
    """

    path: str
    dtype: str
    kinds: tuple[str, ...]
    mixer: tuple[float, ...]
    output: tuple[float, ...]
    propagated: tuple[float, ...]
    final_hidden: float
    token: TokenError
    token_layer: int
    tokens: int
    logit_rms: float | None = None
    kl: float | None = None
    top: TopOne | None = None

    def record(self, target: str, limits: dict[str, float] | None = None) -> dict[str, Any]:
        """As an evidence record of type "divergence", errors in roundings to bfloat16; limits by quantity, likewise."""
        f = in_roundings
        return {
            "type": "divergence", "target": target, "path": self.path, "dtype": self.dtype, "unit": "f",
            "kinds": list(self.kinds), "tokens": self.tokens,
            "mixer": [f(e) for e in self.mixer], "output": [f(e) for e in self.output],
            "propagated": [f(e) for e in self.propagated], "final_hidden": f(self.final_hidden),
            "token": {"error": f(self.token.error), "index": self.token.index, "layer": self.token_layer},
            "kl": self.kl, "logit_rms": self.logit_rms, "top": asdict(self.top) if self.top else None,
            "limits": limits or {},
        }  # fmt: skip


def diverge(
    reference: Reference,
    model: Any,
    path: str,
    batches: Sequence[Batch],
    *,
    exact: Sequence[Trace] | None = None,
    free: Sequence[Trace] | None = None,
    local: Sequence[Batch] | None = None,
    noise: float | None = None,
    dtype: str | None = None,
) -> Divergence:
    """Run `model` over `batches` on the kernels that are bound (the caller binds them and names them `path`).

    exact, free: traces of the batches by the reference and by the model, if they are at hand. local: other batches for
    the layers alone, which cost a forward more. noise: RMS error of a logit beyond whose `MARGIN`-fold a flip of the
    argmax counts; the path's own unless given. dtype: "tf32" where float32 is not what its name says. Raises
    EvidenceError for states that are not finite.
    """
    head = hasattr(model, "lm_head")
    exact = exact or [reference(batch.token_ids, batch.mask, head=head) for batch in batches]
    free = free or [trace(model, batch.token_ids, batch.mask, pieces=batch.pieces) for batch in batches]
    pools = _Pools()
    worst = _layers_alone(reference, model, local or batches, exact if local is None else None, pools)
    pairs: list[tuple[Tensor, Tensor]] = []
    for batch, ours, truth in zip(batches, free, exact, strict=True):
        valid = _valid(batch, truth.final_hidden)
        for layer, (value, base) in enumerate(zip(ours.outputs, truth.outputs, strict=True)):
            pools.add("propagated", layer, value[valid], base[valid])
        pools.add("final", 0, ours.final_hidden[valid], truth.final_hidden[valid])
        if ours.logits is not None and truth.logits is not None:
            pairs.append((ours.logits[valid], truth.logits[valid]))
    name = dtype or DTYPES[str(free[0].final_hidden.dtype).removeprefix("torch.")]
    tokens = sum(int(_valid(batch, truth.final_hidden).sum()) for batch, truth in zip(batches, exact, strict=True))
    return Divergence(
        path, name, reference.shape.kinds, pools["mixer"], pools["output"], pools["propagated"], pools["final"][0],
        *worst, tokens, **_logits(pairs, noise),
    )  # fmt: skip


def judge(found: Divergence, budgets: Budgets, case: str, propagated: bool = True) -> list[Agreement]:
    """The absolute budgets of a path: its layers alone, and with `propagated` (of a target that they were set for) what
    piles up and what is left of it in the logits. Raises ConfigError for a budget that is not there.
    """

    def budget(level: str, what: str) -> Any:
        return budgets.find(level, what, found.dtype, found.path)

    def worst(level: str, what: str, errors: Sequence[float]) -> Agreement:
        index = max(range(len(errors)), key=errors.__getitem__)
        return check(errors[index], budget(level, what), case, index)

    agreements = [
        worst("layer", "mixer", found.mixer),
        worst("layer", "output", found.output),
        check(found.token.error, budget("layer", "token"), f"{case}, layer {found.token_layer}", found.token.index),
    ]
    if propagated:
        agreements += [
            worst("propagated", "output", found.propagated),
            check(found.final_hidden, budget("propagated", "final_hidden"), case),
        ]
        if found.kl is not None and found.top is not None:
            agreements += [
                check(found.kl, budget("logits", "kl"), case),
                check(found.top.flips / max(found.top.decided, 1), budget("logits", "flips"), case),
            ]
    return agreements


def judge_ratio(found: Divergence, baseline: Divergence, budgets: Budgets, case: str) -> list[Agreement]:
    """The relative budgets: the path's error over that of `baseline`, both against the reference; the worst layer's."""
    if (found.kinds, found.tokens, found.dtype) != (baseline.kinds, baseline.tokens, baseline.dtype):
        raise EvidenceError(f"{found.path} and {baseline.path} were not run on the same layers, tokens and precision")
    agreements = []
    for level, what, ours, theirs in (
        ("layer", "mixer ratio", found.mixer, baseline.mixer),
        ("propagated", "output ratio", found.propagated, baseline.propagated),
    ):
        ratios = [error_ratio(a, b) for a, b in zip(ours, theirs, strict=True)]
        index = max(range(len(ratios)), key=ratios.__getitem__)
        agreements.append(check(ratios[index], budgets.find(level, what, found.dtype, found.path), case, index))
    return agreements


def _layers_alone(
    reference: Reference, model: Any, batches: Sequence[Batch], exact: Sequence[Trace] | None, pools: _Pools
) -> tuple[TokenError, int]:
    """Add the errors of every layer fed the reference's input to `pools`; gives the worst token and its layer."""
    worst, where = TokenError(0.0, 0), 0
    for number, batch in enumerate(batches):
        truth = exact[number] if exact else reference(batch.token_ids, batch.mask, head=False)
        valid = _valid(batch, truth.final_hidden)
        forced = trace(model, batch.token_ids, batch.mask, forced=truth.inputs, pieces=batch.pieces)
        for layer, inputs in enumerate(forced.inputs):
            mixer, output = reference.layer(layer, inputs.double(), batch.mask)
            pools.add("mixer", layer, forced.mixers[layer][valid], mixer[valid])
            pools.add("output", layer, forced.outputs[layer][valid], output[valid])
            for row, keep in enumerate(valid):
                found = token_maximum(forced.mixers[layer][row : row + 1, keep], mixer[row : row + 1, keep])
                if found.error > worst.error:
                    worst, where = found, layer
    return worst, where


class _Pools:
    """Relative Frobenius errors of many tensors as if they were one, √(Σ eᵢ² ‖rᵢ‖² / Σ ‖rᵢ‖²), for each layer."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, tuple[float, float]]] = {}

    def add(self, what: str, layer: int, value: Tensor, reference: Tensor) -> None:
        size = float(reference.double().square().sum())
        apart, before = self._sums.setdefault(what, {}).get(layer, (0.0, 0.0))
        self._sums[what][layer] = (apart + relative_error(value, reference) ** 2 * size, before + size)

    def __getitem__(self, what: str) -> tuple[float, ...]:
        """One error per layer."""
        return tuple((apart / size) ** 0.5 for _, (apart, size) in sorted(self._sums[what].items()))


def _valid(batch: Batch, states: Tensor) -> Tensor:
    """[B, T] bool on the states' device, False at pads."""
    if batch.mask is None:
        return states.new_ones(states.shape[:2]).bool()
    return batch.mask.to(states.device).bool()


def _logits(pairs: Sequence[tuple[Tensor, Tensor]], noise: float | None) -> dict[str, Any]:
    if not pairs:
        return {}
    import torch

    logits, truth = (torch.cat(parts).double() for parts in zip(*pairs, strict=True))
    rms = float((logits - truth).square().mean().sqrt())
    return {
        "logit_rms": rms,
        "kl": logit_kl(logits, truth),
        "top": top_one(logits, truth, MARGIN * (rms if noise is None else noise)),
    }
