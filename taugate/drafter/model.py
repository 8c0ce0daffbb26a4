"""The DFlash drafter: one bidirectional pass over a block, with the target's hidden states as extra keys and
values.

After `dflash/model.py` of the public implementation (z-lab, MIT) and arXiv 2602.06036, §3. Shape letters:
N sequences, S context positions, A anchors per sequence, B block size, K taps, H hidden size, D head size.
Unlike the public code it runs many anchors of a sequence at once: their context keys and values are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from taugate.drafter.checkpoint import DrafterConfig, read_config, read_tensors
from taugate.drafter.dflash2 import CandidateSelector, GroupedConv
from taugate.drafter.rope import Rope, Turn, rotate
from taugate.errors import CheckpointError

KeyValue = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32 with weight `w` (the target's own norms use `1 + w`; the drafter's
    never do).
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)
        self.dim, self.groups = dim, config.num_heads // config.num_kv_heads
        self.causal, self.window = config.causal(index), config.window(index)

    def key_value(self, x: Tensor, turn: Turn) -> KeyValue:
        """Keys (normed, rotated) and values, each [..., kv heads, T, D], of `x` [..., T, H]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.dim))).transpose(-2, -3)
        value = self.v_proj(x).unflatten(-1, (-1, self.dim)).transpose(-2, -3)
        return rotate(key, turn), value

    def forward(self, x: Tensor, turn: Turn, context: KeyValue, anchors: Tensor, sizes: Tensor) -> Tensor:
        """Attention of block slots `x` [N, A, B, H] over the context before their anchor and over their own
        block.
        """
        slots = torch.arange(x.shape[2], device=x.device)
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))).transpose(-2, -3)
        query = rotate(query, turn).unflatten(2, (-1, self.groups))
        key, value = self.key_value(x, turn)  # [N, A, kv, B, D]; query is [N, A, kv, group, B, D]
        far = torch.einsum("nakgbd,nksd->nakgbs", query, context[0])
        near = torch.einsum("nakgbd,nakcd->nakgbc", query, key)
        far_ok, near_ok = self._visible(context[0].shape[-2], anchors, sizes, slots)
        scores = torch.cat([far.float() * self.dim**-0.5, near.float() * self.dim**-0.5], dim=-1)
        visible = torch.cat([far_ok, near_ok], dim=-1)[:, :, None, None]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(value.dtype)
        split = far.shape[-1]
        out = torch.einsum("nakgbs,nksd->nakgbd", weights[..., :split], context[1])
        out = out + torch.einsum("nakgbc,nakcd->nakgbd", weights[..., split:], value)
        return self.o_proj(out.flatten(2, 3).transpose(-2, -3).flatten(-2))

    def _visible(self, length: int, anchors: Tensor, sizes: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Masks [N, A, B, S] over the context (strictly before the anchor) and [N, A, B, B] over the
        block.
        """
        distance = (anchors[..., None] + slots)[..., None] - torch.arange(length, device=slots.device)
        far = (torch.arange(length, device=slots.device) < anchors[..., None, None]).expand_as(distance)
        apart = slots[:, None] - slots[None, :]
        near = torch.ones_like(apart, dtype=torch.bool)
        if self.causal:
            near = near & (apart >= 0)
        if self.window is not None:
            far, near = far & (distance < self.window), near & (apart.abs() < self.window)
        # A slot past the end of a cut block is no key for the others; it still sees itself, so that its
        # (unused) row stays finite.
        near = (near & (slots < sizes[..., None, None])) | (apart == 0)
        return far, near


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        self.attention_conv = GroupedConv(hidden, config.dflash2) if config.dflash2 else None
        self.mlp_conv = GroupedConv(hidden, config.dflash2) if config.dflash2 else None

    def forward(self, x: Tensor, turn: Turn, context: KeyValue, anchors: Tensor, sizes: Tensor) -> Tensor:
        def attend(h: Tensor) -> Tensor:
            return self.self_attn(h, turn, context, anchors, sizes)

        x = x + _between(self.attention_conv, self.input_layernorm(x), attend)
        return x + _between(self.mlp_conv, self.post_attention_layernorm(x), self._mlp)

    def _mlp(self, h: Tensor) -> Tensor:
        return self.mlp["down_proj"](functional.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h))


def _between(conv: GroupedConv | None, h: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """A sublayer between the two convolutions of DFlash 2, whose kernels both come from what enters; or
    alone.
    """
    if conv is None:
        return sublayer(h)
    kernels = conv.kernels(h)
    return conv.convolve(sublayer(conv.convolve(h, kernels, 0)), kernels, 1)


class Drafter(nn.Module):
    """DFlash drafter.

    Embedding and head are the target's, handed in as tensors; only a pruned head is its own.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = Rope(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.dflash2:
            self.candidate_selector = CandidateSelector(config.hidden_size, config.vocab_size, config.dflash2)
        if config.draft_vocab_size:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            # Draft token i is target token i + d2t[i].
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def context(self, taps: Tensor) -> list[KeyValue]:
        """Context keys and values per layer from `taps` [N, S, K·H]: the tapped states of positions 0…S-1."""
        if taps.shape[-1] != self.fc.in_features:
            raise CheckpointError(
                f"taps are {taps.shape[-1]} wide, expected {self.fc.in_features} for {self.config.target_layer_ids}"
            )
        features = self.hidden_norm(self.fc(taps))
        turn = self.rope(torch.arange(taps.shape[1], device=taps.device), taps.dtype)
        return [layer.self_attn.key_value(features, turn) for layer in self.layers]

    def forward(
        self, context: list[KeyValue], tokens: Tensor, anchors: Tensor, sizes: Tensor, embedding: Tensor
    ) -> Tensor:
        """Hidden states [N, A, B, H] of one block per anchor, after the drafter's final norm.

        tokens  [N, A] int64: the known token at each anchor; the other slots hold the mask token
        anchors [N, A] int64: absolute positions; a block attends to context positions < its anchor
        sizes   [N, A] int64: slots the block really has, anchor included (smaller near the length cap)
        embedding [V, H]: the target's input embedding
        """
        self._check("embedding", embedding)
        block = tokens.new_full((*tokens.shape, self.config.block_size), self.config.mask_token_id)
        block[..., 0] = tokens
        x = functional.embedding(block, embedding) * self.config.input_embedding_scale
        turn = self.rope((anchors[..., None] + torch.arange(x.shape[2], device=x.device))[..., None, :], x.dtype)
        for layer, keys in zip(self.layers, context, strict=True):
            x = layer(x, turn, keys, anchors, sizes)
        return self.norm(x)

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Vocabulary logits [..., V] of `hidden` [..., H] through the target's `head` [V, H], or the
        drafter's own.
        """
        self._check("head", head)
        pruned = self.config.draft_vocab_size is not None
        out = functional.linear(hidden, self.lm_head.weight if pruned else head)
        if self.config.output_multiplier != 1.0:  # a pass over all logits, so not for nothing
            out = out * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        out = out if cap is None else torch.tanh(out / cap) * cap
        if not pruned:
            return out
        whole = out.new_full((*out.shape[:-1], len(head)), float("-inf"))
        return whole.index_copy_(-1, torch.arange(len(self.d2t), device=out.device) + self.d2t, out)

    def propose(self, hidden: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """The block [R, L] that a greedy drafter proposes after the known tokens [R], from slots 1…L."""
        return self.candidate_selector(hidden, logits, tokens) if self.config.dflash2 else logits.argmax(-1)

    def _check(self, what: str, table: Tensor) -> None:
        wanted = (self.config.vocab_size, self.config.hidden_size)
        if tuple(table.shape) != wanted:
            raise CheckpointError(
                f"the target's {what} has shape {list(table.shape)}, the drafter expects {list(wanted)}"
            )


def load_drafter(directory: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Drafter:
    """Load a drafter from safetensors.

    Raises CheckpointError for missing, extra or misshapen tensors, by name.
    """
    config = read_config(directory)
    tensors = read_tensors(directory, config)
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(tensors, assign=True)
    if (
        config.draft_vocab_size
        and not (ids := drafter.d2t + torch.arange(len(drafter.d2t))).lt(config.vocab_size).all()
    ):
        raise CheckpointError(
            f"drafter {directory}: d2t leads to token {int(ids.max())}, expected below {config.vocab_size}"
        )
    return drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)
