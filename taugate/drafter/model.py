"""The DFlash drafter: one bidirectional pass over a block, with the target's hidden states as extra keys and
values.

After `dflash/model.py` of the public implementation (z-lab, MIT) and arXiv 2602.06036, §3. Shape letters: N sequences,
S context positions, A anchors per sequence, B block size, K taps, H hidden size, D head size. Unlike the public code it
runs many sequences, and many anchors of a sequence, at once: anchors of a sequence share its context's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from taugate.drafter.attention import Attention, Look, RMSNorm, kernels, visible
from taugate.drafter.checkpoint import DrafterConfig, read_config, read_tensors
from taugate.drafter.context import Context
from taugate.drafter.dflash2 import CandidateSelector, GroupedConv
from taugate.drafter.rope import Rope, Turn
from taugate.errors import CheckpointError


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

    def forward(self, x: Tensor, turn: Turn, context: Context, looks: list[Look]) -> Tensor:
        """Block tokens `x` [N, A, B, H] to the same, one layer on."""

        def attend(h: Tensor) -> Tensor:
            return self.self_attn(h.flatten(1, 2), turn, context, looks).view_as(h)

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

    def context(self, taps: Tensor, blocks: int = 1) -> Context:
        """Context keys and values from `taps` [N, S, K·H]: the tapped states of positions 0…S-1.

        blocks: for how many of a sequence's blocks there is room at a time; attention over more runs in several parts.
        """
        if taps.shape[-1] != self.fc.in_features:
            raise CheckpointError(
                f"taps are {taps.shape[-1]} wide, expected {self.fc.in_features} for {self.config.target_layer_ids}"
            )
        features = self.hidden_norm(self.fc(taps))
        turn = self.rope(torch.arange(taps.shape[1], device=taps.device)[:, None], taps.dtype)
        room = blocks * self.config.block_size
        layers = []
        for layer in self.layers:
            pair = (functional.pad(x, (0, 0, 0, 0, room, 0)) for x in layer.self_attn.key_value(features, turn))
            layers.append(tuple(pair))
        return Context(layers, room, torch.zeros(len(taps), dtype=torch.long, device=taps.device))

    def forward(
        self,
        context: Context,
        tokens: Tensor,
        anchors: Tensor,
        sizes: Tensor,
        embedding: Tensor,
        between: tuple[int, int] | None = None,
    ) -> Tensor:
        """Hidden states [N, A, B, H] of one block per anchor, after the drafter's final norm.

        tokens  [N, A] int64: the known token at each anchor; the other slots hold the mask token
        anchors [N, A] int64: absolute positions; a block attends to context positions < its anchor
        sizes   [N, A] int64: slots the block really has, anchor included (smaller near the length cap)
        embedding [V, H]: the target's input embedding
        between: context indices of the lowest and the highest anchor, if known: only what they can see is read then,
        which is a window for sliding layers
        """
        self._check("embedding", embedding)
        block = tokens.new_full((*tokens.shape, self.config.block_size), self.config.mask_token_id)
        block[..., 0] = tokens
        x = functional.embedding(block, embedding) * self.config.input_embedding_scale
        places = anchors[..., None] + torch.arange(x.shape[2], device=x.device)
        turn = self.rope(places.flatten(1)[..., None], x.dtype)
        looks: dict[tuple[bool, int | None], list[Look]] = {}
        with kernels(x.is_cuda):
            for index, layer in enumerate(self.layers):
                kind = self.config.causal(index), self.config.window(index)
                if kind not in looks:
                    looks[kind] = self._looks(context, anchors, sizes, between, *kind, x.dtype)
                x = layer(x, turn, context, looks[kind])
        return self.norm(x)

    def _looks(
        self,
        context: Context,
        anchors: Tensor,
        sizes: Tensor,
        between: tuple[int, int] | None,
        causal: bool,
        window: int | None,
        dtype: torch.dtype,
    ) -> list[Look]:
        lowest, highest = between or (0, context.length)
        first = 0 if window is None else max(0, lowest - window + 1)
        stop = min(highest, context.length)
        block, groups = self.config.block_size, self.config.num_heads // self.config.num_kv_heads
        looks = []
        count = context.room // block
        for begin in range(0, anchors.shape[1], count):
            some = slice(begin, begin + count)
            seen = visible(context, first, stop, anchors[:, some], sizes[:, some], block, causal, window)
            wide = -(-seen.shape[-1] // 16) * 16  # kernels want aligned rows
            mask = torch.full((*seen.shape[:-1], wide), float("-inf"), dtype=dtype, device=seen.device)
            mask[..., : seen.shape[-1]].masked_fill_(seen, 0.0)
            mask = mask[:, None, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
            tokens = slice(begin * block, (begin + count) * block)
            looks.append(Look(tokens, first, stop, mask[..., : seen.shape[-1]]))
        return looks

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Vocabulary logits [..., V] of `hidden` [..., H] through the target's `head` [V, H], or the
        drafter's own.
        """
        self._check("head", head)
        pruned = self.config.draft_vocab_size is not None
        # One product of all rows: a slice of three dimensions would be multiplied sequence by sequence, each against
        # the whole head, eight times as slow on a GPU.
        rows = hidden.reshape(-1, hidden.shape[-1])
        out = functional.linear(rows, self.lm_head.weight if pruned else head).unflatten(0, hidden.shape[:-1])
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
