"""Drafters: trained on random anchors of the target's own continuations, measured by chained τ."""

from __future__ import annotations

import json
import time

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from taugate.drafter.checkpoint import parse_config
from taugate.drafter.model import Drafter
from tools.pair.log import say
from tools.pair.shapes import BLOCK, GAMMA
from tools.pair.target import schedule


def train_drafter(model, made: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], args, device: str, end: int) -> None:
    drafter = Drafter(parse_config(drafter_config(args), "drafter")).to(device)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    if args.resume:
        drafter.load_state_dict(load_file(args.resume / "model.safetensors"))
    size = sum(p.numel() for p in drafter.parameters()) / 1e6
    say(f"drafter {size:.2f}M parameters, taps {args.shape.taps}, block {BLOCK}")
    embedding = model.get_input_embeddings().weight.detach().float()
    data, prompts = made[0].to(device), made[1].to(device)
    taps = args.shape.taps
    states = torch.empty(*data.shape, len(taps) * args.shape.hidden, dtype=torch.bfloat16, device=device)
    for part, out in zip(data.split(1024), states.split(1024), strict=True):
        out.copy_(tapped(model, part.long(), taps))
    say(f"states of {len(data)} sequences: {states.nbytes / 2**30:.1f} GiB")
    ends = last_index(data, prompts, end)
    held_tokens, held_prompts = held[0].to(device).long(), held[1].to(device)
    held_states = torch.cat([tapped(model, part, taps) for part in held_tokens.split(64)]).float()
    held_ends = last_index(held_tokens, held_prompts, end)
    weight = torch.exp(-torch.arange(BLOCK - 1, device=device) / GAMMA)
    slots = torch.arange(1, BLOCK, device=device)
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=args.draft_lr, betas=(0.9, 0.98), weight_decay=0.05, fused=device == "cuda"
    )
    keep = {int(args.draft_steps * share): f"{share:.2f}" for share in (0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 0.8, 0.9)}
    began, loss = time.monotonic(), torch.tensor(float("nan"))
    for step in range(args.draft_steps + 1):
        if step % args.draft_every == 0 or step in keep or step == args.draft_steps:
            tau = chained_tau(drafter.eval(), held_tokens, held_states, held_prompts, held_ends, embedding)
            drafter.train()
            spent = time.monotonic() - began
            say(
                f"drafter step {step}/{args.draft_steps} loss {loss.item():.3f} "
                f"chained tau held-out {tau:.3f} ({spent:.0f} s)"
            )
        if step in keep:
            save_drafter(drafter, args, keep[step], step, tau)
        if step == args.draft_steps:
            save_drafter(drafter, args, "1.00", step, tau)
            return
        for group in optimizer.param_groups:
            group["lr"] = args.draft_lr * schedule(step, args.draft_steps)
        rows = torch.randint(0, len(data), (args.draft_batch,), device=device)
        tokens, last = data[rows].long(), ends[rows]
        # A context never sees a whole number of blocks: anchors are drawn at random, as the paper found best.
        share = torch.rand(args.draft_batch, args.anchors, device=device)
        first = prompts[rows]
        anchors = (first[:, None] + share * (last - first).clamp(min=1)[:, None]).long()
        where = anchors[..., None] + slots
        label = tokens.gather(1, where.clamp(max=tokens.shape[1] - 1).flatten(1)).view_as(where)
        with torch.autocast(device, torch.bfloat16):
            hidden = drafter(
                drafter.context(states[rows], blocks=args.anchors),
                tokens.gather(1, anchors),
                anchors,
                torch.full_like(anchors, BLOCK),
                embedding,
            )
            logits = drafter.logits(hidden[:, :, 1:], embedding)
        each = functional.cross_entropy(logits.float().flatten(0, 2), label.reshape(-1), reduction="none").view_as(
            label
        )
        scale = weight * (where <= last[:, None, None])
        loss = (each * scale).sum() / scale.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.inference_mode()
def tapped(model, tokens: Tensor, taps: tuple[int, ...]) -> Tensor:
    """Concatenated tapped states [N, S, K·H] (bf16) of `tokens` [N, S]."""
    hidden = model.model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([hidden[tap + 1] for tap in taps], -1).to(torch.bfloat16)


@torch.no_grad()
def chained_tau(
    drafter: Drafter, tokens: Tensor, states: Tensor, prompts: Tensor, ends: Tensor, embedding: Tensor
) -> float:
    """Pooled chained τ of a batch: all rows advance together, each by what its block accepted."""
    anchors = prompts[:, None].clone()
    keys = drafter.context(states)
    slots = torch.arange(1, BLOCK, device=tokens.device)
    emitted = cycles = 0
    while (live := anchors[:, 0] < ends).any():
        hidden = drafter(keys, tokens.gather(1, anchors), anchors, torch.full_like(anchors, BLOCK), embedding)
        drafted = drafter.logits(hidden[:, 0, 1:], embedding).argmax(-1)
        truth = tokens.gather(1, (anchors + slots).clamp(max=tokens.shape[1] - 1))
        step = (drafted == truth).long().cumprod(1).sum(1) + 1
        step = torch.minimum(step, (ends - anchors[:, 0]).clamp(min=0))
        emitted += int(step[live].sum())
        cycles += int(live.sum())
        anchors = (anchors[:, 0] + step)[:, None].clamp(max=tokens.shape[1] - 1)
    return emitted / max(cycles, 1)


def last_index(tokens: Tensor, prompts: Tensor, end: int) -> Tensor:
    """Index of the last real token of each row: its first end token after the prompt, or the cap."""
    hit = (tokens == end) & (torch.arange(tokens.shape[1], device=tokens.device) >= prompts[:, None])
    return torch.where(hit.any(1), hit.float().argmax(1), tokens.shape[1] - 1)


def drafter_config(args) -> dict:
    shape = args.shape
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
        "hidden_size": shape.hidden, "intermediate_size": args.draft_inner,
        "num_hidden_layers": args.draft_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "layer_types": ["full_attention"] * args.draft_layers, "num_target_layers": shape.layers, "block_size": BLOCK,
        "tie_word_embeddings": False, "dtype": "bfloat16",
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": list(shape.taps)},
    }


def save_drafter(drafter: Drafter, args, name: str, step: int, tau: float) -> None:
    directory = args.out / "snapshots" / name
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in drafter.state_dict().items()
    }
    save_file(
        tensors,
        directory / "model.safetensors",
        metadata={"format": "pt", "step": str(step), "tau_held_out": f"{tau:.4f}"},
    )
    (directory / "config.json").write_text(json.dumps(drafter_config(args), indent=1) + "\n")
