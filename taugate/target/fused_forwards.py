"""What stands in for the forwards of a hybrid family's modules, and when; `fused` checks each against its own.

Two products of the same input whose weights lie one after the other are one product: its tiles fill the GPU better. An
element of the result is the same sum in the same order, and `fused` sees to it that it is the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from taugate.target import fused_kernels as kernels
from taugate.target.fused import Fused
from taugate.target.fused_attention import ROTARY, attention_wrapper, rotary_wrapper
from taugate.target.kernels import CONVOLUTION, DELTA_RULE, count_call

Forward = Callable[..., Any]
_STATES = ("cache", "cache_params", "attention_mask", "cu_seq_lens_q")
# Of the gated delta net: order of sums, whether the wide products are joined, and whether the narrow ones are.
_WAYS = [(order, *joined) for joined in ((True, True), (True, False), (False, False)) for order in kernels.ORDERS]


def wrappers(fused: Fused, module: Any) -> Iterator[tuple[Any, str, Callable[[Forward], Forward]]]:
    """(owner, attribute, wrapper of what is there) of everything in the modeling module that `fused` can serve."""
    if hasattr(module, CONVOLUTION[0]):
        yield module, CONVOLUTION[0], lambda own: _convolution(fused, own)
    if hasattr(module, ROTARY):
        yield module, ROTARY, lambda own: rotary_wrapper(fused, own)
    by_ending = {
        "RMSNorm": _norm, "RMSNormGated": _gated_norm, "MLP": _mlp,
        "GatedDeltaNet": lambda fused, own: _delta_net(fused, own, module),
        "Attention": lambda fused, own: attention_wrapper(fused, own, module),
    }  # fmt: skip
    for name, cls in list(vars(module).items()):
        for ending, wrapper in by_ending.items():
            if isinstance(cls, type) and name.endswith(ending) and "Vision" not in name and "forward" in vars(cls):
                yield cls, "forward", lambda own, wrapper=wrapper: wrapper(fused, own)


def _norm(fused: Fused, own: Forward) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not _rows_fit(x):
            return own(self, x)
        key = (tuple(x.shape), x.stride(), self.weight.dtype)
        return fused.call(
            "norm", key, lambda way: kernels.rms_norm(x, self.weight, self.eps, way), lambda: own(self, x),
            kernels.ORDERS,
        )  # fmt: skip

    return forward


def _gated_norm(fused: Fused, own: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
        x = hidden_states
        if not (_rows_fit(x) and _fits(x) and _fits(gate) and gate.shape == x.shape):
            return own(self, x, gate)
        key = (tuple(x.shape), self.weight.dtype)
        return fused.call(
            "gated norm", key, lambda way: kernels.rms_norm(x, self.weight, self.variance_epsilon, way, gate),
            lambda: own(self, x, gate), kernels.ORDERS,
        )  # fmt: skip

    return forward


def _mlp(fused: Fused, own: Forward) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj, self.up_proj
        if not _fits(x) or gate.out_features % 16 or gate.bias is not None or up.bias is not None:
            return own(self, x)

        def there(join: bool) -> Tensor:
            return self.down_proj(kernels.silu_product(*_products(x, (gate, up), join)))

        key = (tuple(x.shape), gate.out_features)
        return fused.call("MLP", key, there, lambda: own(self, x), (True, False))

    return forward


def _convolution(fused: Fused, own: Forward) -> Forward:
    def convolution(x: Tensor, weight: Tensor, bias: Any = None, activation: str | None = None, **given: Any) -> Tensor:
        def there(_: None) -> Tensor:
            count_call(CONVOLUTION[0], kernels.__name__)
            return kernels.convolution(x[0].T.contiguous(), weight)[2].T[None]

        packed = given.get("seq_idx") is not None or given.get("cu_seqlens") is not None
        plain = bias is None and activation == "silu" and not packed and x.shape[0] == 1 and x.shape[1] % 16 == 0
        plain = plain and x.shape[2] >= kernels.FEWEST_ROWS
        if not (plain and kernels.on_gpu(x) and _fits(weight) and weight.shape[1] == 4):
            return own(x, weight, bias, activation=activation, **given)
        key = (tuple(x.shape), x.stride(), tuple(weight.shape))
        return fused.call(
            "convolution", key, there, lambda: own(x, weight, bias, activation=activation, **given), (None,)
        )

    return convolution


def _delta_net(fused: Fused, own: Forward, module: Any) -> Forward:
    """A prompt at once, without a cache and without pads; anything else takes the layer's own forward."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
        x = hidden_states
        rest = {name: value for name, value in given.items() if name not in _STATES}
        states = [*args, *(given.get(name) for name in _STATES)]
        whole = not any(state is not None for state in states) and x.shape[0] == 1
        if not (whole and _fits(x) and x.shape[1] >= kernels.FEWEST_ROWS and _layer_fits(self)):
            return own(self, x, *args, **given)

        def there(way: tuple[kernels.Order, bool, bool]) -> Tensor:
            order, join, join_gates = way
            mixed, z = _products(x, (self.in_proj_qkv, self.in_proj_z), join)
            a, b = _products(x, (self.in_proj_a, self.in_proj_b), join_gates)
            count_call(CONVOLUTION[0], kernels.__name__)
            q, k, v = kernels.convolution(mixed[0], self.conv1d.weight.squeeze(1), self.key_dim)
            decay, beta = kernels.gates(a, b, self.A_log, self.dt_bias)
            out, _ = getattr(module, DELTA_RULE[0])(
                q.view(1, len(q), -1, self.head_k_dim), k.view(1, len(k), -1, self.head_k_dim),
                v.view(1, len(v), -1, self.head_v_dim), g=decay, beta=beta, initial_state=None,
                output_final_state=False, use_qk_l2norm_in_kernel=True, cu_seqlens=None, **rest,
            )  # fmt: skip
            rows = out.reshape(-1, self.head_v_dim)
            normed = kernels.rms_norm(rows, self.norm.weight, self.norm.variance_epsilon, order, z[0])
            return self.out_proj(normed.view(1, x.shape[1], -1))

        key = (tuple(x.shape), self.conv_dim, self.value_dim, self.A_log.dtype, self.norm.weight.dtype)
        return fused.call("gated delta net", key, there, lambda: own(self, x, *args, **given), _WAYS)

    return forward


def _layer_fits(layer: Any) -> bool:
    products = [getattr(layer, f"in_proj_{name}", None) for name in ("qkv", "z", "a", "b")]
    return (
        all(product is not None and product.bias is None for product in products)
        and layer.conv1d.bias is None
        and layer.activation == "silu"
        and layer.conv1d.weight.shape[-1] == 4
        and layer.key_dim % 256 == layer.value_dim % 16 == layer.head_v_dim % 128 == 0
    )


def _products(x: Tensor, layers: tuple[Any, Any], join: bool) -> tuple[Tensor, Tensor]:
    """x through two linear layers; join: as one product, if their weights lie one after the other in one buffer."""
    one, other = (layer.weight for layer in layers)
    if one.data_ptr() > other.data_ptr():
        there, here = _products(x, layers[::-1], join)
        return here, there
    adjacent = (
        one.is_contiguous()
        and other.is_contiguous()
        and one.dtype == other.dtype
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and other.data_ptr() == one.data_ptr() + one.nbytes
    )
    if not (join and adjacent):
        return layers[0](x), layers[1](x)
    both = torch.as_strided(one, (len(one) + len(other), one.shape[1]), one.stride())
    found = linear(x, both)
    return found[..., : len(one)], found[..., len(one) :]


def _fits(x: Tensor) -> bool:
    return kernels.on_gpu(x) and x.is_contiguous()


def _rows_fit(x: Tensor) -> bool:
    """Whether the last dimension is whole groups of 128, and its rows are many and evenly spaced by multiples of 16."""
    width = x.shape[-1]
    if not (kernels.on_gpu(x) and x.dim() >= 2 and x.stride(-1) == 1 and width % 128 == 0 and x.stride(-2) % 16 == 0):
        return False
    expected = x.stride(-2)
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return x.numel() // width >= kernels.FEWEST_ROWS
