"""Attention whose output is gated, as hybrid targets have it: rotary embedding and gate by fused kernels.

The module copies the gate and the attention's output to where they can be multiplied; here one kernel reads both where
they lie. As for everything fused, `fused` checks that the bits are the module's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from triton.language.extra import libdevice

from taugate.target.fused import Fused
from taugate.target.fused_kernels import FEWEST_ROWS, on_gpu, on_its_device

ROTARY = "apply_rotary_pos_emb"
_HARMLESS = ("position_ids", "cache_position", "use_cache")  # arguments that do not reach the attention itself
_WAYS = (True, False)  # whether the attention itself groups the heads, or keys and values are repeated for it


@triton.jit(do_not_specialize=["tokens", "rows", "token_stride", "head_stride"])
def _rotary_kernel(
    x, cos, sin, out, tokens, rows, token_stride, head_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    token_stride = token_stride // 16 * 16  # tells the compiler what is known, so that it loads many elements at once
    head_stride = head_stride // 16 * 16
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    there = (row < rows) & (column < WIDTH)
    token = row % tokens
    begin = x + token.to(tl.int64) * token_stride + (row // tokens).to(tl.int64) * head_stride
    value = tl.load(begin + column, there, 0.0)
    half = TURNED // 2
    turns = there & (column < TURNED)
    partner = tl.load(begin + tl.where(column < half, column + half, column - half), turns, 0.0).to(tl.float32)
    partner = tl.where(column < half, -partner, partner)
    at = token * TURNED + column
    one = (value.to(tl.float32) * tl.load(cos + at, turns, 0.0).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    other = (partner * tl.load(sin + at, turns, 0.0).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    tl.store(out + row.to(tl.int64) * WIDTH + column, tl.where(turns, (one + other).to(tl.bfloat16), value), there)


@triton.jit(do_not_specialize=["tokens", "heads", "token_stride", "head_stride", "gate_token_stride", "gate_stride"])
def _gated_kernel(
    x, gate, out, tokens, heads, token_stride, head_stride, gate_token_stride, gate_stride,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token_stride = token_stride // 16 * 16  # as above
    head_stride = head_stride // 16 * 16
    gate_token_stride = gate_token_stride // 16 * 16
    gate_stride = gate_stride // 16 * 16
    head = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    there = (token < tokens) & (column < WIDTH)
    z = tl.load(gate + token * gate_token_stride + head * gate_stride + column, there, 0.0).to(tl.float32)
    opened = tl.div_rn(1.0, 1.0 + libdevice.exp(-z)).to(tl.bfloat16).to(tl.float32)
    value = tl.load(x + token * token_stride + head * head_stride + column, there, 0.0).to(tl.float32)
    tl.store(out + (token * heads + head) * WIDTH + column, (value * opened).to(tl.bfloat16), there)


@on_its_device
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, heads, tokens, N] in bfloat16 with its first R elements turned by contiguous cos and sin [1, tokens, R].

    N is a power of two, the strides of heads and tokens are multiples of 16; the result is contiguous.
    """
    _, heads, tokens, width = x.shape
    out, rows = x.new_empty(x.shape), heads * tokens
    _rotary_kernel[(triton.cdiv(rows, 8),)](
        x, cos, sin, out, tokens, rows, x.stride(2), x.stride(1), 8, width, cos.shape[-1],
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@on_its_device
def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x [1, heads, tokens, N] times sigmoid(gate), which is rounded before, contiguous as [1, tokens, heads, N].

    gate: [1, tokens, heads, N]; all in bfloat16. N is a power of two, the strides of heads and tokens are multiples
    of 16.
    """
    _, heads, tokens, width = x.shape
    out = x.new_empty(gate.shape)
    _gated_kernel[(heads, triton.cdiv(tokens, 16))](
        x, gate, out, tokens, heads, x.stride(2), x.stride(1), gate.stride(1), gate.stride(2), 16, width,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def rotary_wrapper(fused: Fused, own: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for the modeling module's `apply_rotary_pos_emb`."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **given: Any) -> tuple[Tensor, Tensor]:
        usual = not args and not given and q.shape[0] == 1
        flat = all(on_gpu(x) and x.is_contiguous() for x in (cos, sin)) and cos.shape == sin.shape
        if not (usual and flat and _spaced(q) and _spaced(k)):
            return own(q, k, cos, sin, *args, **given)
        key = (tuple(q.shape), tuple(k.shape), q.stride(), k.stride(), tuple(cos.shape))
        return fused.call(
            "rotary", key, lambda _: (rotary(q, cos, sin), rotary(k, cos, sin)), lambda: own(q, k, cos, sin), (None,)
        )

    return turned


def attention_wrapper(fused: Fused, own: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """What stands in for the forward of the modeling module's attention: a prompt at once, without cache or mask."""

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None,
                *args: Any, **given: Any) -> tuple[Tensor, Any]:  # fmt: skip
        x = hidden_states
        states = [attention_mask, *args, *(value for name, value in given.items() if name not in _HARMLESS)]
        whole = all(state is None for state in states) and x.dim() == 3 and x.shape[0] == 1
        if not (whole and on_gpu(x) and x.shape[1] >= FEWEST_ROWS and _gates_heads(self)):
            return own(self, x, position_embeddings, attention_mask, *args, **given)

        def there(grouped: bool) -> Tensor:
            heads = (1, x.shape[1], -1, self.head_dim)
            q, gate = self.q_proj(x).view(1, x.shape[1], -1, 2 * self.head_dim).chunk(2, -1)
            q, k = self.q_norm(q).transpose(1, 2), self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
            v = self.v_proj(x).view(heads).transpose(1, 2)
            q, k = getattr(module, ROTARY)(q, k, *position_embeddings)
            if not grouped:
                k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling, enable_gqa=grouped)
            if not (_spaced(out) and _spaced(gate)):
                raise ValueError("the attention's output is spaced in another way")
            return self.o_proj(gated(out, gate).flatten(2))

        key = (tuple(x.shape), self.q_proj.out_features, self.k_proj.out_features, self.head_dim)
        return fused.call(
            "attention", key, there, lambda: own(self, x, position_embeddings, attention_mask, *args, **given)[0], _WAYS
        ), None

    return forward


def _gates_heads(layer: Any) -> bool:
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "num_key_value_groups", "scaling")
    return (
        all(hasattr(layer, part) for part in parts)
        and layer.q_proj.out_features == 2 * layer.o_proj.in_features
        and layer.head_dim.bit_count() == 1
        and layer.config._attn_implementation == "sdpa"
        and layer.is_causal
        and not layer.training
    )


def _spaced(x: Tensor) -> bool:
    """Whether [1, A, B, N] can be read by the kernels: rows of a power of two, spaced by multiples of 16."""
    even = not x.stride(1) % 16 and not x.stride(2) % 16
    return on_gpu(x) and x.stride(-1) == 1 and even and x.shape[-1].bit_count() == 1
