"""The whole Gated DeltaNet layer of transformers, with its core on any path, beside the float64 layer.

The layer is transformers' own module (projections, convolution, gates, gated norm); only the function of its core is
replaced while it runs. Its weights are random, spread as at initialisation.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taugate.errors import EvidenceError
from taugate.numerics.cases import Run
from taugate.numerics.kernels import Inputs
from taugate.numerics.reference import GdnShape, gdn_layer

if TYPE_CHECKING:
    from torch import Tensor, nn

_MODELING = "transformers.models.qwen3_5.modeling_qwen3_5"


@dataclass(frozen=True)
class LayerCase:
    """One problem at layer level.

    left_pads: masked tokens before the first of two sequences. split: after so many tokens the layer goes on from its
    cache, with all others at once, or with each alone (decode).
    """

    name: str
    tokens: int
    hidden: int = 48
    shape: GdnShape = GdnShape(1, 2, 32, 32)
    left_pads: int = 0
    split: int = 0
    decode: bool = False


LAYER_CASES = (
    LayerCase("70 tokens", 70),
    LayerCase("left padding", 40, left_pads=27),
    LayerCase("prefill in two parts", 80, split=70),
    LayerCase("decode after prefill", 68, split=66, decode=True),
)


@dataclass(frozen=True)
class Layer:
    """transformers' module with its configuration, and an input [B, T, D] in its dtype.

    masked: whether it is told where pads are. between: called with the cache before each later part of a split case.
    """

    module: nn.Module
    config: Any
    hidden: Tensor
    masked: bool = True
    between: Callable[[Any], None] = lambda cache: None


def build(case: LayerCase, dtype: str, seed: int, device: str = "cpu") -> Layer:
    """A layer in "fp32", "tf32" or "bf16"; A_log and the norm's weight are float32 in each, as in checkpoints."""
    import torch
    from transformers import Qwen3_5TextConfig

    shape = case.shape
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=case.hidden, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=shape.key_heads,
        linear_num_value_heads=shape.value_heads, linear_key_head_dim=shape.key_dim,
        linear_value_head_dim=shape.value_dim, rms_norm_eps=shape.norm_eps, layer_types=["linear_attention"],
    )  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    module = importlib.import_module(_MODELING).Qwen3_5GatedDeltaNet(config, 0).eval().requires_grad_(False)
    for projection in (module.in_proj_qkv, module.in_proj_z, module.in_proj_a, module.in_proj_b, module.out_proj):
        projection.weight.normal_(0, projection.weight.shape[1] ** -0.5, generator=draw)
    module.conv1d.weight.normal_(0, 0.3, generator=draw)
    step = 1e-3 * 100 ** torch.rand(shape.value_heads, generator=draw)
    module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus⁻¹
    a_log = (0.5 + 15.5 * torch.rand(shape.value_heads, generator=draw)).log()
    norm = 1 + 0.1 * torch.randn(shape.value_dim, generator=draw)
    hidden = torch.randn(2 if case.left_pads else 1, case.tokens, case.hidden, generator=draw)
    if dtype == "bf16":
        module, hidden = module.bfloat16(), hidden.bfloat16()
    module.A_log.data, module.norm.weight.data = a_log, norm
    return Layer(module.to(device), config, hidden.to(device))


def run_layer(case: LayerCase, layer: Layer, chunk: Run, recurrent: Run) -> Tensor:
    """Output [B, T, D] of transformers' layer, called the case's way, with its core on `chunk` (single tokens that go
    on from a cache: `recurrent`). What stands on pads is set to zero: nobody reads it."""
    import torch

    module, hidden = layer.module, layer.hidden
    ieee = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # its convolutions would take TF32 by default
    with torch.no_grad(), core_on(chunk, recurrent), ieee:
        if not case.split:
            out = module(hidden, None, _mask(case, hidden) if layer.masked else None)
            out[:1, : case.left_pads] = 0
            return out
        from transformers import DynamicCache

        cache = DynamicCache(config=layer.config)
        ends = [case.split, *(range(case.split + 1, case.tokens + 1) if case.decode else [case.tokens])]
        outs = [module(hidden[:, : case.split], cache)]
        for start, end in zip(ends, ends[1:], strict=False):
            layer.between(cache)
            outs.append(module(hidden[:, start:end], cache))
        return torch.cat(outs, dim=1)


def expected_layer(case: LayerCase, layer: Layer) -> Tensor:
    """The float64 layer on the same weights and input, in one go, and each sequence without its pads."""
    import torch

    weights = dict(layer.module.named_parameters())
    if not case.left_pads:
        return gdn_layer(layer.hidden, weights, case.shape).out
    full = gdn_layer(layer.hidden[1:], weights, case.shape).out
    short = gdn_layer(layer.hidden[:1, case.left_pads :], weights, case.shape).out
    return torch.cat([torch.cat([full.new_zeros(1, case.left_pads, full.shape[2]), short], dim=1), full])


def _mask(case: LayerCase, hidden: Tensor) -> Tensor | None:
    """A batch of two: the first sequence is padded on the left, the second is not."""
    import torch

    if not case.left_pads:
        return None
    mask = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    mask[0, : case.left_pads] = 0
    return mask


@contextmanager
def core_on(chunk: Run, recurrent: Run) -> Iterator[None]:
    """While the body runs, the gated delta rules of transformers' Qwen3.5 are these two; restored afterwards.

    Raises EvidenceError when the layer never called it: then nothing was tested.
    """
    module = importlib.import_module(_MODELING)
    calls = 0

    def core(name: str, run: Run) -> Any:
        @functools.wraps(getattr(module, name))  # `run` may be the function that it replaces, found by unwrapping
        def called(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            l2norm = kwargs.get("use_qk_l2norm_in_kernel", False)
            out, state = run(Inputs(q, k, v, g, beta, kwargs.get("initial_state"), l2norm=l2norm))
            return out, state if kwargs.get("output_final_state") else None

        return called

    runs = {"torch_chunk_gated_delta_rule": chunk, "torch_recurrent_gated_delta_rule": recurrent}
    replaced = {name: core(name, run) for name, run in runs.items()}
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):  # in PyTorch, whatever else is installed
        replaced |= {name: inspect.unwrap(getattr(module, name))} if hasattr(module, name) else {}
    originals = {name: getattr(module, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(module, name, function)
    if not calls:
        raise EvidenceError("the layer ran without calling a gated delta rule; this transformers binds it otherwise")

