"""Triton kernels that do at once what transformers' modules do in six to ten launches, in the same order of roundings.

They are meant to give the modules' own bits, not merely close values: products and sums are not contracted, exp and the
division are those of CUDA's C library, and a row's squares are summed as PyTorch's reduction sums them (Reduce.cuh: a
warp for a row, four accumulators a lane, then a tree over the lanes). Which tree, and which elements are a lane's,
changed between releases, so it is a parameter, and `fused` tries. Nothing here is believed without that trial.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

Order = tuple[bool, bool]
Result = TypeVar("Result")
# (a lane's four elements lie side by side, the tree over the lanes begins with the farthest): newest release first.
ORDERS: tuple[Order, ...] = ((True, True), (False, True), (False, False), (True, False))
# Below so many rows PyTorch gives a row more than one warp, and the order is another.
FEWEST_ROWS = 16


@triton.jit
def _silu(z):
    """As CUDA's expf and a division rounded to nearest give it; tl.exp and `/` are approximations."""
    return tl.div_rn(z, 1.0 + libdevice.exp(-z))


@triton.jit
def _halved(sums, ROWS: tl.constexpr, LEFT: tl.constexpr, FARTHEST_FIRST: tl.constexpr):
    """[ROWS, 2 · LEFT] to [ROWS, LEFT]: a lane and its partner, added."""
    if FARTHEST_FIRST:
        pairs = tl.sum(tl.reshape(sums, (ROWS, 2, LEFT)), 1)
    else:
        pairs = tl.sum(tl.reshape(sums, (ROWS, LEFT, 2)), 2)
    return pairs


@triton.jit(do_not_specialize=["rows", "stride", "heads", "gate_stride"])
def _norm_kernel(
    x, weight, gate, out, rows, stride, heads, gate_stride, share, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr, FARTHEST_FIRST: tl.constexpr,
):  # fmt: skip
    stride = stride // 16 * 16  # tells the compiler what is known, so that it loads many elements at once
    gate_stride = gate_stride // 16 * 16
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    begin = row.to(tl.int64)[:, None] * stride
    lane = tl.arange(0, 32)[None, :, None]
    part = tl.arange(0, 4)[None, None, :]
    place = 4 * lane + part if SIDE_BY_SIDE else lane + 32 * part
    sums = tl.zeros((ROWS, 32, 4), tl.float32)
    for first in range(0, WIDTH, 128 * GROUPS):
        for group in tl.static_range(GROUPS):
            column = first + 128 * group + place
            v = tl.load(x + begin[:, :, None] + column, there[:, :, None] & (column < WIDTH), 0.0).to(tl.float32)
            sums += v * v
    even, odd = tl.split(tl.reshape(sums, (ROWS, 32, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    total = ((a + b) + c) + d
    total = _halved(total, ROWS, 16, FARTHEST_FIRST)
    total = _halved(total, ROWS, 8, FARTHEST_FIRST)
    total = _halved(total, ROWS, 4, FARTHEST_FIRST)
    total = _halved(total, ROWS, 2, FARTHEST_FIRST)
    total = _halved(total, ROWS, 1, FARTHEST_FIRST)
    factor = tl.rsqrt(total * share + eps)  # [ROWS, 1]
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        inside = there & (column < WIDTH)
        v = tl.load(x + begin + column, inside, 0.0).to(tl.float32) * factor
        w = tl.load(weight + column, column < WIDTH, 0.0)
        here = row.to(tl.int64)[:, None] * WIDTH + column
        if GATED:  # the norm's value is rounded before the weight, which may be fp32, and the gate comes last
            v = (v.to(tl.bfloat16).to(tl.float32) * w.to(tl.float32)).to(w.dtype).to(tl.float32)
            there_too = (row // heads).to(tl.int64)[:, None] * gate_stride + (row % heads)[:, None] * WIDTH + column
            v = v * _silu(tl.load(gate + there_too, inside, 0.0).to(tl.float32))
        else:
            v = v * (1.0 + w.to(tl.float32))
        tl.store(out + here, v.to(tl.bfloat16), inside)


@triton.jit(do_not_specialize=["width", "stride"])
def _silu_product_kernel(gate, up, out, width, stride, BLOCK: tl.constexpr):
    width = width // 16 * 16  # as above
    stride = stride // 16 * 16
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    silu = _silu(tl.load(gate + row * stride + column, there, 0.0).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    product = silu * tl.load(up + row * stride + column, there, 0.0).to(tl.float32)
    tl.store(out + row * width + column, product.to(tl.bfloat16), there)


@triton.jit(do_not_specialize=["tokens", "channels", "stride", "first"])
def _convolution_kernel(x, weight, out, tokens, channels, stride, first, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    channels = channels // 16 * 16  # as above
    stride = stride // 16 * 16
    first = first // CHANNELS * CHANNELS
    begin = tl.program_id(0) * CHANNELS
    channel = begin + tl.arange(0, CHANNELS)[None, :]
    inside = channel < channels
    w0 = tl.load(weight + channel * 4, inside, 0.0).to(tl.float32)
    w1 = tl.load(weight + channel * 4 + 1, inside, 0.0).to(tl.float32)
    w2 = tl.load(weight + channel * 4 + 2, inside, 0.0).to(tl.float32)
    w3 = tl.load(weight + channel * 4 + 3, inside, 0.0).to(tl.float32)
    # Queries, keys and values are three matrices, one after the other; a block lies in one of them.
    part = (begin >= first).to(tl.int32) + (begin >= 2 * first).to(tl.int32)
    width = tl.where(part == 2, channels - 2 * first, first) // 16 * 16
    to = out + (part * first).to(tl.int64) * tokens - part * first + channel
    # The last block reaches back into the one before, where it writes the same again, so that no block is cut.
    token = tl.minimum(tl.program_id(1) * TOKENS, tokens - TOKENS) + tl.arange(0, TOKENS)[:, None]
    everywhere = inside & (token >= 0)  # the shape of a block
    at = x + token.to(tl.int64) * stride + channel
    # Each is read four times, all but once from the cache; carried along, each would wait for the one before.
    a = tl.load(at - 3 * stride, inside & (token >= 3), 0.0).to(tl.float32)
    b = tl.load(at - 2 * stride, inside & (token >= 2), 0.0).to(tl.float32)
    c = tl.load(at - stride, inside & (token >= 1), 0.0).to(tl.float32)
    d = tl.load(at, everywhere, 0.0).to(tl.float32)
    total = ((a * w0 + b * w1) + c * w2) + d * w3
    silu = _silu(total.to(tl.bfloat16).to(tl.float32))
    tl.store(to + token.to(tl.int64) * width, silu.to(tl.bfloat16), everywhere)


@triton.jit(do_not_specialize=["count", "heads", "stride"])
def _gates_kernel(a, b, a_log, dt_bias, decay, beta, count, heads, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    head = at % heads
    place = at // heads * stride + head
    rate = libdevice.exp(tl.load(a_log + head, there, 0.0).to(tl.float32))
    step = tl.load(a + place, there, 0.0).to(tl.float32) + tl.load(dt_bias + head, there, 0.0).to(tl.float32)
    power = libdevice.exp(step)
    # log(1 + p) is p where p is tiny; libdevice's, which flushes subnormal numbers, gives nought for the least.
    softplus = tl.where(step > 20.0, step, tl.where(power < 1e-12, power, libdevice.log1p(power)))
    tl.store(decay + at, -rate * softplus, there)
    z = tl.load(b + place, there, 0.0).to(tl.float32)
    tl.store(beta + at, tl.div_rn(1.0, 1.0 + libdevice.exp(-z)).to(tl.bfloat16), there)


def on_its_device(function: Callable[..., Result]) -> Callable[..., Result]:
    """Launch where the first argument is: Triton launches on the current device, wherever its tensors are."""

    @functools.wraps(function)
    def there(x: Tensor, *args: Any, **given: Any) -> Result:
        with torch.cuda.device_of(x):
            return function(x, *args, **given)

    return there


def on_gpu(x: Tensor) -> bool:
    """Whether the kernels can have it: bfloat16 on a GPU."""
    return x.is_cuda and x.dtype == torch.bfloat16


@on_its_device
def rms_norm(x: Tensor, weight: Tensor, eps: float, order: Order, gate: Tensor | None = None) -> Tensor:
    """The RMS norm of x [..., N] in bfloat16 over its last dimension, a multiple of 128; rows evenly spaced, by a
    multiple of 16 elements.

    Without a gate: x·rsqrt(mean x² + eps)·(1 + weight). With gate [tokens, heads·N], whose rows may be spaced:
    …·weight·silu(gate), as before the output projection of Gated DeltaNet; x is [tokens·heads, N].
    """
    width, stride = x.shape[-1], x.stride(-2)
    rows = x.numel() // width
    out = x.new_empty(x.shape)
    heads, gate_stride = (1, 0) if gate is None else (gate.shape[-1] // width, gate.stride(-2))
    several, groups, block = (16, width // 128, width) if width in (128, 256) else (4, 10, 1024)
    _norm_kernel[(triton.cdiv(rows, several),)](
        x, weight, x if gate is None else gate, out, rows, stride, heads, gate_stride, 1.0 / width, eps,
        width, several, groups, block, gate is not None, *order, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@on_its_device
def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up of two bfloat16 tensors [..., N] with the same spacing of rows, silu rounded in between.

    N and the spacing are multiples of 16.
    """
    out, width = gate.new_empty(gate.shape), gate.shape[-1]
    grid = (triton.cdiv(width, 1024), gate.numel() // width)
    _silu_product_kernel[grid](gate, up, out, width, gate.stride(-2), 1024, num_warps=4, enable_fp_fusion=False)
    return out


@on_its_device
def convolution(x: Tensor, weight: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """silu of the causal depthwise convolution of x [tokens, channels] with weight [channels, 4], in bfloat16: its
    first `first` channels, as many again, and the rest, each contiguous.

    At least 16 tokens; the spacing of rows and `channels` are multiples of 16, `first` of 256.
    """
    tokens, channels = x.shape
    out = x.new_empty(tokens * channels)
    grid = (triton.cdiv(channels, 256), triton.cdiv(tokens, 16))
    _convolution_kernel[grid](
        x, weight, out, tokens, channels, x.stride(0), first, 16, 256, num_warps=4, enable_fp_fusion=False
    )
    queries, keys, values = out.split([tokens * first, tokens * first, tokens * (channels - 2 * first)])
    return queries.view(tokens, first), keys.view(tokens, first), values.view(tokens, channels - 2 * first)


@on_its_device
def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The log decay -exp(a_log)·softplus(a + dt_bias) in float32, beta = sigmoid(b) in bfloat16; [..., heads] each.

    a and b are spaced alike; the results are contiguous.
    """
    decay, beta = a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)
    _gates_kernel[(triton.cdiv(a.numel(), 512),)](
        a, b, a_log, dt_bias, decay, beta, a.numel(), a.shape[-1], a.stride(-2), 512,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return decay, beta
