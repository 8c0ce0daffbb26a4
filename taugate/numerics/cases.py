"""Inputs on which paths are compared: decay regimes, sizes around the borders of chunks, and ways of calling.

Regimes. A kernel can be right in one and wrong in another: with strong forgetting a lost state does not show, with
long memory a shifted decay does not.

init        decay as models are initialised: A in [0.5, 16], dt log-uniform in [1e-3, 1e-1]
long        long memory: A = 1, dt in [1e-3, 1e-2]
none        no decay at all: a plain delta rule
strong      strong forgetting: log-decay in [-8, -1]
correlated  decay as init, keys close to one direction: the triangular system is at its worst
small       decay as init, q and k of norm ~1e-3·√K: the epsilon of their normalisation is what matters
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from taugate.numerics.kernels import Inputs
from taugate.numerics.reference import gated_delta_rule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Run = Callable[[Inputs], "tuple[Tensor, Tensor]"]
REGIMES = ("init", "long", "none", "strong", "correlated", "small")
CHUNK = 64


@dataclass(frozen=True)
class Case:
    """One problem: sizes, regime, and how the path is called on it (a key of CALLS)."""

    name: str
    tokens: int
    regime: str = "init"
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    batch: int = 1
    initial_state: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    way: str = "whole"

    def inputs(self, dtype: str, seed: int, device: str = "cpu") -> Inputs:
        """The problem's tensors for "fp32", "tf32" (the same ones) or "bf16", drawn on the CPU: the same everywhere."""
        import torch

        draw = torch.Generator().manual_seed(seed)
        low = torch.bfloat16 if dtype == "bf16" else torch.float32
        rows, wide = (self.batch, self.tokens), self.value_heads

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        q, k = (normal(*rows, self.key_heads, self.key_dim) for _ in range(2))
        if self.regime == "correlated":
            k = normal(1, 1, self.key_heads, self.key_dim) + 0.3 * k
        if self.regime == "small":
            q, k = 1e-3 * q, 1e-3 * k
        v = normal(*rows, wide, self.value_dim)
        beta = torch.rand((*rows, wide), generator=draw)
        state = normal(self._states(), wide, self.key_dim, self.value_dim) if self.initial_state else None
        found = Inputs(q.to(low), k.to(low), v.to(low), self._decay(draw), beta.to(low), state, self.cu_seqlens)
        return found.to(device)

    def _states(self) -> int:
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def _decay(self, draw: torch.Generator) -> Tensor:
        """g [B, T, HV] in float32."""
        import torch

        shape = (self.batch, self.tokens, self.value_heads)
        u = torch.rand(shape, generator=draw)
        if self.regime == "none":
            return torch.zeros(shape)
        if self.regime == "strong":
            return -1 - 7 * u
        slow, fast = (1e-3, 1e-2) if self.regime == "long" else (1e-3, 1e-1)
        step = slow * (fast / slow) ** u
        rate = 1.0 if self.regime == "long" else 0.5 + 15.5 * torch.rand(self.value_heads, generator=draw)
        return -rate * step


def core_cases(packed: bool) -> list[Case]:
    """What every path is run on at core level. packed: with packed sequences, which the torch paths refuse."""
    cases = [Case("1 token, batch of 8", 1, value_heads=1, batch=8)]
    cases += [Case(f"{n} tokens", n, value_heads=1) for n in (63, 64, 65, 127)]
    cases += [
        Case("long memory", 130, "long", value_heads=1),
        Case("no decay", 80, "none", value_heads=1),
        Case("strong decay", 70, "strong", value_heads=1),
        Case("correlated keys", 80, "correlated", value_heads=1),
        Case("small q and k", 66, "small", value_heads=1),
        Case("2 k heads for 4 v heads, 16 wide and 8", 66, key_heads=2, value_heads=4, key_dim=16, value_dim=8),
        Case("initial state, batch of 2", 66, "long", value_heads=1, batch=2, initial_state=True),
        Case("split off the grid", 70, "long", value_heads=1, way="split at 40"),
        Case("split on the grid", 80, "long", value_heads=1, way="split at 64"),
        Case("left padding", 40, "long", value_heads=1, way="left pads"),
        Case("right padding", 30, "long", value_heads=1, way="right pads"),
    ]
    if packed:
        cases.append(
            Case("packed sequences", 70, "long", value_heads=1, cu_seqlens=(0, 1, 4, 68, 70), initial_state=True)
        )
    return cases


def recurrent_cases(packed: bool) -> list[Case]:
    """Smaller ones for the token-by-token kernel, which the interpreter runs at 5 ms per token and head."""
    small = {"key_dim": 16, "value_dim": 8, "value_heads": 1}
    cases = [Case(f"{regime} decay", 24, regime, **small) for regime in ("init", "long", "strong", "small")]
    cases += [
        Case("1 token, batch of 8", 1, batch=8, **small),
        Case("2 k heads for 4 v heads", 7, key_heads=2, value_heads=4, key_dim=16, value_dim=8),
        Case("initial state", 12, "long", initial_state=True, **small),
        Case("split", 20, "long", way="split at 7", **small),
    ]
    if packed:
        cases.append(Case("packed sequences", 16, "long", cu_seqlens=(0, 1, 6, 16), **small))
    return cases


def expected(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What the float64 reference says, whichever way a path is called: ways must not change results."""
    return gated_delta_rule(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta,
        initial_state=inputs.initial_state, cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip


def run_case(case: Case, run: Run, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Output and final state of a path called the case's way. The state is None where the way says nothing of it."""
    kind, _, at = case.way.partition(" at ")
    return {"whole": run, "split": _split(run, int(at or 0)), "left pads": _left(run), "right pads": _right(run)}[kind](
        inputs
    )


def part(inputs: Inputs, start: int | None, stop: int | None, state: Tensor | None) -> Inputs:
    """Tokens start to stop, going on from a state."""
    cut = {name: getattr(inputs, name)[:, start:stop] for name in ("q", "k", "v", "g", "beta")}
    return replace(inputs, initial_state=state, **cut)


def _split(run: Run, at: int) -> Run:
    """A prefill in two parts, the second going on from the state of the first."""
    import torch

    def split(inputs: Inputs) -> tuple[Tensor, Tensor]:
        first, state = run(part(inputs, None, at, inputs.initial_state))
        second, state = run(part(inputs, at, None, state))
        return torch.cat([first, second], dim=1), state

    return split


def pad(inputs: Inputs, before: int, after: int) -> Inputs:
    """Pads as a model feeds them: its input is masked, so q = k = v = 0, but beta = sigmoid(0) and g is not 0."""
    import torch

    def padded(x: Tensor, value: float) -> Tensor:
        shape = (x.shape[0], before + x.shape[1] + after, *x.shape[2:])
        out = torch.full(shape, value, dtype=x.dtype, device=x.device)
        out[:, before : before + x.shape[1]] = x
        return out

    values = {"q": 0.0, "k": 0.0, "v": 0.0, "g": -0.05, "beta": 0.5}
    return replace(inputs, **{name: padded(getattr(inputs, name), value) for name, value in values.items()})


def _left(run: Run, pads: int = 27) -> Run:
    def left(inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, state = run(pad(inputs, pads, 0))
        return out[:, pads:], state

    return left


def _right(run: Run, pads: int = 27) -> Callable[[Inputs], tuple[Tensor, None]]:
    """After right padding the outputs hold, the state does not: it decays on pads, so no cache is made this way."""

    def right(inputs: Inputs) -> tuple[Tensor, None]:
        out, _ = run(pad(inputs, 0, pads))
        return out[:, : inputs.q.shape[1]], None

    return right
