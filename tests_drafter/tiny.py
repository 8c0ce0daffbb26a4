"""Tiny random drafters, and texts of which they guess runs of every length."""

from __future__ import annotations

import dataclasses

import torch

from taugate.drafter.config import parse_config
from taugate.drafter.model import Drafter
from taugate.drafter.replay import CachedSequence

torch.set_num_threads(1)  # of tensors this small, a second thread only gets in the way

VOCAB, MASK, HIDDEN = 40, 39, 32
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


def raw_config(layers=("full_attention",) * 2, block=6, vocab=VOCAB, hidden=HIDDEN, **changes):
    """A z-lab `config.json`; `dflash_config` entries are given as keyword `nested`."""
    nested = {"mask_token_id": MASK, "target_layer_ids": [1, 3], **changes.pop("nested", {})}
    sliding = {"sliding_window": 16, "use_sliding_window": True} if "sliding_attention" in layers else {}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "layer_types": list(layers),
        "num_target_layers": 6,
        "block_size": block,
        **sliding,
        "dflash_config": nested,
        **changes,
    }


def drafter(raw=None, seed=0):
    """A drafter with random weights."""
    torch.manual_seed(seed)
    made = Drafter(parse_config(raw or raw_config(), "config.json")).eval().requires_grad_(False)
    for name, tensor in made.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5 if "norm" in name else torch.randn_like(tensor) * 0.3)
    return made


def tables(config, seed=0):
    """Random embedding and head [V, H] of a target."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.vocab_size, config.hidden_size)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def draft(model, tokens, taps, anchor, size, embedding, head):
    """Logits [size - 1, V] and drafted tokens of one block: alone, nothing but what it may see, no slot to
    spare.
    """
    alone = object.__new__(Drafter)
    alone.__dict__ = {**model.__dict__, "config": dataclasses.replace(model.config, block_size=size)}
    where, known = torch.tensor([[anchor]]), torch.tensor([[tokens[anchor]]])
    hidden = alone(alone.context(taps[None, :anchor]), known, where, torch.tensor([[size]]), embedding)[0, :, 1:]
    logits = alone.logits(hidden, head)
    return logits[0], alone.propose(hidden, logits, known[0])[0].tolist()


def text(model, prompt, new, taps, embedding, head, generator, end=None):
    """A sequence of up to `new` tokens that takes a random share of each block that the drafter offers."""
    tokens = torch.randint(0, MASK - 1, (prompt + 1,), generator=generator).tolist()
    cap, full = prompt + new, model.config.block_size
    while len(tokens) < cap:
        anchor = len(tokens) - 1
        size = min(full, cap - anchor)
        guessed = draft(model, tokens, taps, anchor, size, embedding, head)[1]
        keep = int(torch.randint(0, full, (1,), generator=generator))
        tokens += guessed[:keep] + torch.randint(0, MASK - 1, (1,), generator=generator).tolist()
    tokens = tokens[:cap]
    if end is not None:
        tokens = tokens[: prompt + 1 + end % (new - 1)]
    return CachedSequence("text", tuple(tokens), prompt, cap)


def slow_chain(model, sequence, taps, embedding, head):
    """Emitted tokens of every cycle, one block at a time."""
    out, anchor = [], sequence.prompt_length
    while anchor < sequence.last:
        size = min(model.config.block_size, sequence.cap - anchor)
        guessed = draft(model, sequence.token_ids, taps, anchor, size, embedding, head)[1]
        truth = sequence.token_ids[anchor + 1 : anchor + size]
        run = next((n for n, (a, b) in enumerate(zip(guessed, truth, strict=False)) if a != b), len(truth))
        out.append(min(run + 1, sequence.last - anchor))
        anchor += out[-1]
    return out
