"""The target: trained on next tokens, then asked for its own greedy continuations."""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from taugate.target.segments import cache_argument, new_cache
from tools.pair.log import say
from tools.pair.text import windows


def make_target(ids: Tensor, held: Tensor, args, device: str, end: int):
    shape = args.shape
    common = dict(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=args.target_inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=shape.head_dim, tie_word_embeddings=True,
        max_position_embeddings=4096, eos_token_id=end, pad_token_id=end, bos_token_id=None,
    )  # fmt: skip
    if args.full_attention:
        config = Qwen3Config(**common)
        model = Qwen3ForCausalLM(config).to(device)
    else:
        linear = dict(
            linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32
        )
        config = Qwen3_5TextConfig(**common, **linear)
        model = Qwen3_5ForCausalLM(config).to(device)
    say(f"target {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, layers {config.layer_types}")
    train_target(model, ids, held, args, device)
    return model.to(torch.bfloat16).eval()


def train_target(model, ids: Tensor, held: Tensor, args, device: str) -> None:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2]
    others = [p for n, p in model.named_parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.target_lr,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    source = ids.to(device)
    began = time.monotonic()
    for step in range(args.target_steps):
        for group in optimizer.param_groups:
            group["lr"] = args.target_lr * schedule(step, args.target_steps)
        starts = torch.randint(0, len(ids) - args.length - 1, (args.batch,), device=device)
        batch = source[starts[:, None] + torch.arange(args.length, device=device)]
        with torch.autocast(device, torch.bfloat16):
            loss = next_token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0 or step in (5, 20, 50):
            rate = (step + 1) * args.batch * args.length / (time.monotonic() - began)
            say(f"target step {step}/{args.target_steps} loss {loss.item():.3f} {rate / 1e3:.0f}k tokens/s")
    model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        starts = torch.randint(0, len(held) - args.length - 1, (args.batch,))
        say(
            f"target held-out loss {next_token_loss(model, windows(held, starts, args.length, device)).item():.3f}"
            " nats/token"
        )


def schedule(step: int, total: int, warm: int = 100) -> float:
    """Linear warm-up, then linear decay to 2 %."""
    return min(1.0, (step + 1) / warm) * max(0.02, 1 - step / total)


def next_token_loss(model, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].reshape(-1))


@torch.inference_mode()
def continue_greedily(model, prompts: Tensor, new: int, end: int) -> Tensor:
    """Greedy continuations [N, P + new] of `prompts` [N, P]; positions after the end token repeat it."""
    out, done = [prompts], torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
    cache = {cache_argument(model.forward): new_cache(model.config)}
    step = model(input_ids=prompts, use_cache=True, logits_to_keep=1, **cache)
    for _ in range(new):
        token = step.logits[:, -1].argmax(-1)
        token = torch.where(done, end, token)
        done = done | (token == end)
        out.append(token[:, None])
        step = model(input_ids=token[:, None], use_cache=True, **cache)
    return torch.cat(out, 1)


def distinct(tokens: Tensor, n: int = 8) -> Tensor:
    """Share of distinct n-grams in each row of `tokens` [N, T], by a rolling hash."""
    powers = torch.tensor([1_000_003**i % (2**61 - 1) for i in range(n)], device=tokens.device)
    grams = (tokens.unfold(1, n, 1) * powers % (2**61 - 1)).sum(-1).sort(1).values
    return 1 - (grams[:, 1:] == grams[:, :-1]).float().mean(1)


def regenerate(model, ids: Tensor, begins: Tensor, count: int, args, device: str, end: int) -> tuple[Tensor, Tensor]:
    """Prompts from the corpus continued by the target: tokens [count, total] (int16) and prompt lengths [count].

    Prompts begin at top-level statements and have one of several lengths, as the shipped ones have.
    """
    rows, lengths, made, began = [], [], 0, time.monotonic()
    usable = begins[begins < len(ids) - args.total]
    while made < count:
        prompt = random.choice(args.prompts)
        pick = usable[torch.randint(0, len(usable), (args.generate_batch,))]
        tokens = continue_greedily(model, windows(ids, pick, prompt, device), args.total - prompt, end)
        # Loops teach a drafter to copy, which is not what it is judged by.
        keep = distinct(tokens[:, prompt:]) >= args.distinct
        rows.append(tokens[keep].to(torch.int16).cpu())
        lengths.append(torch.full((len(rows[-1]),), prompt))
        made += len(rows[-1])
        if len(rows) % 8 == 1:
            kept, spent = keep.float().mean().item(), time.monotonic() - began
            say(f"regenerated {made}/{count}, kept {kept:.2f}, {made / spent:.0f} sequences/s")
    return torch.cat(rows)[:count], torch.cat(lengths)[:count]
