"""How far a path is from the float64 reference at each level of a model.

layer: every layer is fed what the reference fed it, rounded to the path's precision, and is compared with the
reference on that same rounded input, so that nothing but the layer's own arithmetic counts; the token mixer alone
(`mixer`), where nothing hides behind the residual, and the whole layer (`block`). propagated: the path runs freely and
its error piles up. logits: what is left of it in the distribution of the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from taugate.errors import EvidenceError
from taugate.numerics.measures import (
    TokenError,
    TopOne,
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

DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}
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

    def valid(self, states: Tensor) -> Tensor:
        """[B, T] bool on the device of `states` [B, T, …], False at pads."""
        if self.mask is None:
            return states.new_ones(states.shape[:2]).bool()
        return self.mask.to(states.device).bool()


@dataclass(frozen=True)
class Divergence:
    """Relative errors of one path against the reference, pooled over all tokens that are no pads; one per layer.

    token: the mixers' worst token, with its layer in `token_layer`. logit_rms, kl (nats) and top: None without a head.
    """

    path: str
    dtype: str
    kinds: tuple[str, ...]
    mixer: tuple[float, ...]
    block: tuple[float, ...]
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
            "mixer": [f(e) for e in self.mixer], "block": [f(e) for e in self.block],
            "propagated": [f(e) for e in self.propagated], "final_hidden": f(self.final_hidden),
            "token": {"error": f(self.token.error), "index": self.token.index, "layer": self.token_layer},
            "kl": self.kl, "logit_rms": self.logit_rms, "top": asdict(self.top) if self.top else None,
            "limits": limits or {},
        }  # fmt: skip


class Comparison:
    """One path beside the reference, batch by batch, so that nothing but sums is kept.

    model: a transformers causal language model (or its text model) on the kernels that are bound when `add` is called;
    dtype: "tf32" where float32 is not what its name says; record: applied to what is recorded of a free run (a fault).
    `pairs` are the tensors compared last, (path, reference) of every layer.
    """

    def __init__(
        self,
        reference: Reference,
        model: Any,
        path: str,
        dtype: str | None = None,
        record: Callable[[Trace], Trace] | None = None,
    ) -> None:
        self._reference, self._model, self.path = reference, model, path
        self.dtype = dtype or DTYPES[str(next(model.parameters()).dtype)]
        self._record = record
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._pools = _Pools()
        self._worst, self._where, self._tokens = TokenError(0.0, 0), 0, 0
        self._logits: list[tuple[int, float, float, TopOne]] = []

    def exact(self, batch: Batch) -> Trace:
        """The reference's trace of a batch."""
        return self._reference(batch.token_ids, batch.mask, head=hasattr(self._model, "lm_head"))

    def add(self, batch: Batch, exact: Trace | None = None) -> Trace:
        """Run freely, compare, and return the path's trace. Raises EvidenceError for states that are not finite."""
        exact = exact or self.exact(batch)
        free = trace(self._model, batch.token_ids, batch.mask, pieces=batch.pieces)
        if self._record:
            free = self._record(free)
        valid = batch.valid(exact.final_hidden)
        self._tokens += int(valid.sum())
        ends = [*zip(free.outputs, exact.outputs, strict=True), (free.final_hidden, exact.final_hidden)]
        self.pairs = [(value[valid], base[valid]) for value, base in ends]
        for layer, (value, base) in enumerate(self.pairs[:-1]):
            self._pools.add("propagated", layer, value, base)
        self._pools.add("final", 0, *self.pairs[-1])
        if free.logits is not None and exact.logits is not None:
            self._add_logits(free.logits[valid], exact.logits[valid])
        return free

    def add_layers(self, batch: Batch, exact: Trace | None = None) -> None:
        """Run every layer on the reference's input, and compare."""
        exact = exact or self.exact(batch)
        valid = batch.valid(exact.final_hidden)
        forced = trace(self._model, batch.token_ids, batch.mask, forced=exact.inputs, pieces=batch.pieces)
        self.pairs = []
        for layer, inputs in enumerate(forced.inputs):
            mixer, block = self._reference.layer(layer, inputs.double(), batch.mask)
            self.pairs.append((forced.mixers[layer][valid], mixer[valid]))
            self._pools.add("mixer", layer, *self.pairs[-1])
            self._pools.add("block", layer, forced.outputs[layer][valid], block[valid])
            for row, keep in enumerate(valid):
                found = token_maximum(forced.mixers[layer][row : row + 1, keep], mixer[row : row + 1, keep])
                if found.error > self._worst.error:
                    self._worst, self._where = found, layer

    def errors(self, what: str) -> tuple[float, ...]:
        """Errors so far of "mixer", "block" or "propagated", one per layer, or of "final" (hidden).

        Raises EvidenceError before any was measured.
        """
        if not (found := self._pools[what]):
            raise EvidenceError(f"path {self.path} was not compared at every level: {what} was not measured")
        return found

    @property
    def worst_token(self) -> tuple[TokenError, int]:
        """The mixers' worst token and its layer."""
        return self._worst, self._where

    def result(self) -> Divergence:
        """Raises EvidenceError before both levels have been measured."""
        return Divergence(
            self.path, self.dtype, self._reference.shape.kinds, self.errors("mixer"), self.errors("block"),
            self.errors("propagated"), self.errors("final")[0], *self.worst_token, self._tokens, **self.logits(),
        )  # fmt: skip

    def _add_logits(self, logits: Tensor, exact: Tensor) -> None:
        rms = float((logits.double() - exact).square().mean().sqrt())
        self._logits.append((len(logits), rms, logit_kl(logits, exact), top_one(logits, exact, MARGIN * rms)))

    def logits(self) -> dict[str, Any]:
        """logit_rms, kl and top of all tokens so far; empty without a head."""
        if not self._logits:
            return {}
        total = sum(count for count, *_ in self._logits)
        return {
            "logit_rms": (sum(n * rms**2 for n, rms, _, _ in self._logits) / total) ** 0.5,
            "kl": sum(n * kl for n, _, kl, _ in self._logits) / total,
            "top": TopOne(
                sum(n * top.same for n, _, _, top in self._logits) / total,
                sum(top.decided for *_, top in self._logits),
                sum(top.flips for *_, top in self._logits),
            ),
        }


def diverge(
    reference: Reference, model: Any, path: str, batches: Sequence[Batch], dtype: str | None = None
) -> Divergence:
    """Both levels of every batch, see `Comparison`."""
    comparison = Comparison(reference, model, path, dtype)
    for batch in batches:
        exact = comparison.exact(batch)
        comparison.add(batch, exact)
        comparison.add_layers(batch, exact)
    return comparison.result()


class _Pools:
    """Relative Frobenius errors of many tensors as if they were one, √(Σ eᵢ² ‖rᵢ‖² / Σ ‖rᵢ‖²), for each layer."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, tuple[float, float]]] = {}

    def add(self, what: str, layer: int, value: Tensor, reference: Tensor) -> None:
        size = float(reference.double().square().sum())
        apart, before = self._sums.setdefault(what, {}).get(layer, (0.0, 0.0))
        self._sums[what][layer] = (apart + relative_error(value, reference) ** 2 * size, before + size)

    def __getitem__(self, what: str) -> tuple[float, ...]:
        """One error per layer, none before anything was added."""
        return tuple((apart / size) ** 0.5 for _, (apart, size) in sorted(self._sums.get(what, {}).items()))
