"""Known bugs, injected one at a time into a path that works: what the budgets are worth.

`seen` names where a public engine or trainer had it, if one is known. `dtype` is the precision in which its check sees
it: a rounding of the gate, the state or A_log drowns in the noise of bfloat16 and needs float32 in IEEE arithmetic; a
structural error shows in bfloat16 as well. `case` is the check: the same case, clean, must be within every budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from taugate.numerics.cases import CHUNK, Case, Run, part
from taugate.numerics.kernels import Inputs
from taugate.numerics.layer import Layer, LayerCase

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Fault:
    """One bug: its name, where it was seen, the precision and the check that must fail, and how it is injected.

    run wraps the path (its chunk and its recurrent kernel); layer changes transformers' layer, not the reference.
    """

    name: str
    seen: str
    dtype: str
    case: Case | LayerCase
    run: Callable[[Run], Run] | None = None
    layer: Callable[[Layer], Layer] | None = None

    @property
    def level(self) -> str:
        return "core" if isinstance(self.case, Case) else "layer"


def _inputs(change: Callable[[Inputs], Inputs]) -> Callable[[Run], Run]:
    """A fault that lies in what the kernel is given."""
    return lambda run: lambda inputs: run(change(inputs))


def _segments(carry: Callable[[Tensor], Tensor | None]) -> Callable[[Run], Run]:
    """A fault in what goes from one chunk to the next: chunk by chunk, with `carry` between them."""

    def wrap(run: Run) -> Run:
        def segmented(inputs: Inputs) -> tuple[Tensor, Tensor]:
            import torch

            outs, state = [], inputs.initial_state
            for start in range(0, inputs.q.shape[1], CHUNK):
                out, last = run(part(inputs, start, start + CHUNK, state))
                outs.append(out)
                state = carry(last)
            return torch.cat(outs, dim=1), last

        return segmented

    return wrap


def _to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def _value_lost(inputs: Inputs) -> Inputs:
    v = inputs.v.clone()
    v[:, v.shape[1] // 2] = 0
    return replace(inputs, v=v)


def _pads_unmasked(inputs: Inputs) -> Inputs:
    """Tokens that came in masked (k = 0) get what an unmasked pad token would give."""
    import torch

    pads = (inputs.k == 0).all(-1).all(-1)[0]
    draw = torch.Generator().manual_seed(9)
    changed = {}
    for name in ("q", "k", "v"):
        x = getattr(inputs, name).clone()
        x[:, pads] = torch.randn(x[:, pads].shape, generator=draw).to(x)
        changed[name] = x
    return replace(inputs, **changed)


def _other_epsilon(inputs: Inputs) -> Inputs:
    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().sum(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)

    return replace(inputs, q=norm(inputs.q), k=norm(inputs.k), l2norm=False)


def _tiled_heads(inputs: Inputs) -> Inputs:
    times = inputs.v.shape[2] // inputs.q.shape[2]
    return replace(inputs, q=inputs.q.repeat(1, 1, times, 1), k=inputs.k.repeat(1, 1, times, 1))


def _stale_state(inputs: Inputs) -> Inputs:
    import torch

    shape = (inputs.q.shape[0], inputs.v.shape[2], inputs.q.shape[-1], inputs.v.shape[-1])
    state = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(9))
    return replace(inputs, initial_state=state.to(inputs.q.device))


def _leaking(run: Run) -> Run:
    def leaking(inputs: Inputs) -> tuple[Tensor, Tensor]:
        sequences = len(inputs.cu_seqlens or ()) - 1
        out, state = run(replace(inputs, cu_seqlens=None))
        return out, state.expand(sequences, *state.shape[1:])

    return leaking


def _right_pads_in_state(run: Run) -> Run:
    from taugate.numerics.cases import pad

    def padded(inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, state = run(pad(inputs, 0, 20))
        return out[:, : inputs.q.shape[1]], state

    return padded


def _a_log_rounded(layer: Layer) -> Layer:
    import copy

    module = copy.deepcopy(layer.module)
    module.A_log.data = _to_bf16(module.A_log.data)
    return replace(layer, module=module)


def _conv_forgets(cache: Any) -> None:
    states = cache.layers[0].conv_states  # one tensor, or (transformers 5.24) several by number
    (states[0] if isinstance(states, dict) else states).zero_()


_LONG = Case("long memory, 3 chunks", 130, "long", value_heads=1)
_INIT = Case("decay as initialised, 2 chunks", 100, value_heads=1)
_GROUPED = Case("2 k heads for 4 v heads", 64, key_heads=2, value_heads=4, key_dim=16, value_dim=8)
_PACKED = Case("packed sequences", 64, "long", value_heads=1, cu_seqlens=(0, 20, 64))

FAULTS = (
    Fault("state dropped at a chunk border", "sparkinfer #1071", "bf16", _LONG, _segments(lambda state: None)),
    Fault("one token's value zeroed", "", "bf16", _LONG, _inputs(_value_lost)),
    Fault(
        "left pads not masked (core)", "maxtext #5295", "bf16",
        Case("left padding", 40, "long", value_heads=1, way="left pads"), _inputs(_pads_unmasked),
    ),
    Fault(
        "right pads reach the cached state", "transformers, both paths", "bf16",
        Case("64 tokens, long memory", 64, "long", value_heads=1), _right_pads_in_state,
    ),
    Fault("decay shifted by a token", "", "bf16", _INIT, _inputs(lambda i: replace(i, g=i.g.roll(1, 1)))),
    Fault("beta shifted by a token", "", "bf16", _LONG, _inputs(lambda i: replace(i, beta=i.beta.roll(1, 1)))),
    Fault("gate rounded to bfloat16", "", "fp32", _INIT, _inputs(lambda i: replace(i, g=_to_bf16(i.g)))),
    Fault("state rounded to bfloat16", "vllm #34489, ollama #15865", "fp32", _LONG, _segments(_to_bf16)),
    Fault(
        "l2norm epsilon 1e-5 for 1e-6", "transformers #40842, vLLM's CPU reference", "fp32",
        Case("small q and k", 64, "small", value_heads=1), _inputs(_other_epsilon),
    ),
    Fault("k heads tiled over v heads, not grouped", "", "bf16", _GROUPED, _inputs(_tiled_heads)),
    Fault(
        "stale initial state", "vllm #51562", "bf16",
        Case("65 tokens, long memory", 65, "long", value_heads=1), _inputs(_stale_state),
    ),
    Fault("packed sequences leak into each other", "slime #1686, fla #838", "bf16", _PACKED, _leaking),
    Fault(
        "A_log rounded to bfloat16", "ms-swift #9972, sglang #20741", "fp32",
        LayerCase("70 tokens", 70), layer=_a_log_rounded,
    ),
    Fault(
        "left pads not masked (layer)", "transformers #46773", "bf16",
        LayerCase("left padding", 40, left_pads=24), layer=lambda layer: replace(layer, masked=False),
    ),
    Fault(
        "decoding forgets the convolution's last inputs", "vllm #40738", "bf16",
        LayerCase("decode after prefill", 66, split=64, decode=True),
        layer=lambda layer: replace(layer, between=_conv_forgets),
    ),
)  # fmt: skip
"""The faults at core and layer level. Off-by-one taps and a normed last layer are faults of a whole model."""
