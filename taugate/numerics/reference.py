"""The gated delta rule and the layer around it in true float64: what every kernel is compared with.

`model.double()` is not such a reference: transformers casts the core, the norms and the gate to float32 inside, and
fla's naive functions do the same. Everything here stays in float64 from the first line to the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taugate.errors import EvidenceError

if TYPE_CHECKING:
    from torch import Tensor

L2NORM_EPS = 1e-6
"""Added to the squared norm of q and k, as fla and transformers do."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    l2norm: float | None = L2NORM_EPS,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token, in float64 on the device of its inputs.

        S_t = exp(g_t) S_{t-1};  S_t += k_t ⊗ β_t (v_t − S_tᵀ k_t);  o_t = S_tᵀ q_t · scale

    (Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks, eq. 10.) q, k [B, T, H, K]; v [B, T, HV, V]; g (log of
    the decay) and beta [B, T, HV]; HV is a multiple of H, and each k head serves HV/H consecutive v heads (grouped
    value attention). initial_state [N, HV, K, V] with N = B, or one per packed sequence. scale: K^-½ unless given.
    l2norm: epsilon of x·rsqrt(Σx² + ε) on q and k, None for none. cu_seqlens: borders of sequences packed into B = 1.

    Returns output [B, T, HV, V] and final state [N, HV, K, V]. Raises EvidenceError for shapes that do not fit.
    """
    import torch

    heads, value_heads = q.shape[2], v.shape[2]
    if value_heads % heads or k.shape != q.shape or g.shape != v.shape[:3] or beta.shape != v.shape[:3]:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip("qkvgβ", (q, k, v, g, beta), strict=True))
        raise EvidenceError(f"shapes do not fit a gated delta rule: {shapes}")
    q, k, v, g, beta = (x.detach().to(torch.float64) for x in (q, k, v, g, beta))
    if l2norm is not None:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + l2norm) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(value_heads // heads, dim=2) for x in (q, k))
    if cu_seqlens is None:
        return _recurrence(q, k, v, g.exp(), beta, initial_state)
    borders = [int(x) for x in cu_seqlens]
    if q.shape[0] != 1 or borders[0] != 0 or borders[-1] != q.shape[1] or borders != sorted(borders):
        raise EvidenceError(f"cu_seqlens {borders} do not divide one row of {q.shape[1]} tokens")
    outs, states = [], []
    for number, (start, end) in enumerate(zip(borders, borders[1:], strict=False)):
        begin = None if initial_state is None else initial_state[number : number + 1]
        part = (x[:, start:end] for x in (q, k, v, g.exp(), beta))
        out, state = _recurrence(*part, begin)
        outs.append(out)
        states.append(state)
    return torch.cat(outs, dim=1), torch.cat(states)


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As above with q normalised and scaled, one k head per v head, and exp(g) as `decay`; all float64."""
    import torch

    batch, tokens, heads, width = q.shape
    if state is None:
        s = q.new_zeros(batch * heads, width, v.shape[-1])
    else:
        s = state.detach().to(q.device, torch.float64).reshape(batch * heads, width, v.shape[-1]).clone()
    # [T, B·H, …]: one contiguous slice per token.
    q, k, v = (x.permute(1, 0, 2, 3).reshape(tokens, batch * heads, 1, -1) for x in (q, k, v))
    decay, beta = (x.permute(1, 0, 2).reshape(tokens, batch * heads, 1, 1) for x in (decay, beta))
    out = torch.empty_like(v)
    for t in range(tokens):
        s = s * decay[t]
        s = torch.baddbmm(s, k[t].mT, beta[t] * (v[t] - torch.bmm(k[t], s)))
        out[t] = torch.bmm(q[t], s)
    out = out.reshape(tokens, batch, heads, -1).permute(1, 0, 2, 3).contiguous()
    return out, s.reshape(batch, heads, width, -1)


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = −exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), [B, T, HV] in float64."""
    import torch

    a, b, a_log, dt_bias = (x.detach().to(torch.float64) for x in (a, b, a_log, dt_bias))
    return -a_log.exp() * torch.logaddexp(a + dt_bias, a.new_zeros(())), b.sigmoid()


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, state: Tensor | None = None) -> Tensor:
    """silu of the depthwise causal convolution over time, float64.

    x [B, T, C]; weight [C, W] (or [C, 1, W]), the last tap is the current token; state [B, W − 1, C] are the inputs
    before the first token, zeros unless given. Returns [B, T, C].
    """
    import torch

    weight = weight.detach().to(torch.float64).reshape(weight.shape[0], -1)
    taps = weight.shape[1]
    x = x.detach().to(torch.float64)
    before = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if state is None else state.to(x)
    x = torch.cat([before, x], dim=1)
    tokens = x.shape[1] - taps + 1
    out = sum(x[:, i : i + tokens] * weight[:, i] for i in range(taps))
    if bias is not None:
        out = out + bias.detach().to(torch.float64)
    return out * out.sigmoid()


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x · rsqrt(mean x² + eps) · weight · silu(z) over the last dimension, in float64: norm before gate."""
    import torch

    x, z, weight = (t.detach().to(torch.float64) for t in (x, z, weight))
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight * (z * z.sigmoid())


@dataclass(frozen=True)
class GdnShape:
    """Sizes of one Gated DeltaNet layer: heads and their widths, and the epsilon of its output norm."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class GdnResult:
    """What a layer leaves: output [B, T, D], recurrent state [N, HV, K, V], last inputs of the conv [B, W−1, C]."""

    out: Tensor
    state: Tensor
    conv_state: Tensor


def gdn_layer(
    hidden: Tensor,
    weights: Mapping[str, Tensor],
    shape: GdnShape,
    *,
    mask: Tensor | None = None,
    state: Tensor | None = None,
    conv_state: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> GdnResult:
    """One whole Gated DeltaNet layer (the mixer, without the block's norm and residual) in float64.

    hidden [B, T, D]; weights by their names in a Qwen3.5 checkpoint, without prefix (in_proj_qkv.weight, conv1d.weight,
    A_log, …), of any dtype: they are taken as they are and never rounded. mask [B, T]: 0 on pads, which then enter as
    zeros. state, conv_state: where to go on. cu_seqlens: borders of packed sequences, which neither the convolution
    nor the recurrence crosses. Raises EvidenceError for shapes that do not fit.
    """
    import torch

    w = {name: value.detach().to(hidden.device, torch.float64) for name, value in weights.items()}
    x = hidden.detach().to(torch.float64)
    if mask is not None:
        x = x * mask[:, :, None].to(torch.float64)
    qkv = x @ w["in_proj_qkv.weight"].mT
    if cu_seqlens is None:
        mixed = causal_conv1d(qkv, w["conv1d.weight"], w.get("conv1d.bias"), conv_state)
    else:
        ends = list(cu_seqlens)
        parts = (qkv[:, i:j] for i, j in zip(ends, ends[1:], strict=False))
        mixed = torch.cat([causal_conv1d(p, w["conv1d.weight"], w.get("conv1d.bias")) for p in parts], dim=1)
    keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    q, k, v = mixed.split([keys, keys, values], dim=-1)
    q, k = (t.unflatten(-1, (shape.key_heads, shape.key_dim)) for t in (q, k))
    v, z = (t.unflatten(-1, (shape.value_heads, shape.value_dim)) for t in (v, x @ w["in_proj_z.weight"].mT))
    g, beta = gates(x @ w["in_proj_a.weight"].mT, x @ w["in_proj_b.weight"].mT, w["A_log"], w["dt_bias"])
    core, final = gated_delta_rule(q, k, v, g, beta, initial_state=state, cu_seqlens=cu_seqlens)
    out = gated_rms_norm(core, z, w["norm.weight"], shape.norm_eps).flatten(2) @ w["out_proj.weight"].mT
    taps = w["conv1d.weight"].shape[-1]
    before = qkv.new_zeros(qkv.shape[0], taps - 1, qkv.shape[2]) if conv_state is None else conv_state.to(qkv)
    return GdnResult(out, final, torch.cat([before, qkv], dim=1)[:, 1 - taps :])
