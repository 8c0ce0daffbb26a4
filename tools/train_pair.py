"""Train the tiny pair that the embedded host serves: a hybrid target and DFlash drafters for it.

    python tools/train_pair.py OUT [--full-attention] [--smoke]

Stages: corpus → BPE tokenizer → target (next-token loss) → the target's own greedy continuations → drafters
(random anchors, cross-entropy on those continuations, position weights exp(-(k-1)/γ); arXiv 2602.06036, §3.3).
Everything runs through the PyTorch fallback of the gated delta rule: fla's gated backward refuses Hopper with
Triton < 3.7.1. Minutes on one H200; never run by tests.

--full-attention trains another pair, of a Qwen3 target without recurrent layers and small enough to be run hundreds of
times in a test: the public implementation is lossless there, so that acceptance lengths can be compared with it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

sys.modules["fla"] = None  # type: ignore[assignment]  # transformers binds fla by import; see above
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM  # noqa: E402  # noqa: E402

from taugate.drafter.checkpoint import parse_config  # noqa: E402
from taugate.drafter.model import Drafter  # noqa: E402
from tools.corpus import collect, manifest  # noqa: E402

END, MASK = "<|endoftext|>", "<|mask|>"
BLOCK, GAMMA = 8, 4.0


@dataclass(frozen=True)
class Shape:
    """Sizes of one pair. taps: target layers that the drafter reads; two query heads share a key head."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    taps: tuple[int, ...]
    head_dim: int
    draft_layers: int


HYBRID = Shape(4096, 256, 640, 8, (0, 2, 4, 5, 6), 64, 3)
FULL = Shape(2048, 128, 320, 10, (1, 3, 5, 7, 8), 32, 2)
START = time.monotonic()
LOG: list[str] = []


def say(*words: object) -> None:
    line = f"[{time.monotonic() - START:7.1f}] " + " ".join(str(word) for word in words)
    LOG.append(line)
    print(line, flush=True)


def train_tokenizer(texts: list[str], path: Path, size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[END, MASK]
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], end: int) -> tuple[Tensor, Tensor]:
    """All texts as one id stream, and the stream positions at which a top-level statement of a file begins."""
    size = tokenizer.get_vocab_size()
    newline = {i for i in range(size) if tokenizer.decode([i]).endswith("\n")}
    stream = list(chain.from_iterable(e.ids + [end] for e in tokenizer.encode_batch(texts)))
    ids = torch.tensor(stream)
    breaks = torch.zeros(size, dtype=torch.bool)
    breaks[list(newline)] = True
    # A line that starts without indentation: the token before it ends in a newline, its own begins with a letter.
    letter = torch.tensor(
        [
            tokenizer.decode([i])[:1] in set('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@_"#')
            for i in range(size)
        ]
    )
    begins = (breaks[ids[:-1]] & letter[ids[1:]]).nonzero()[:, 0] + 1
    return ids, begins


def windows(source: Tensor, starts: Tensor, length: int, device: str) -> Tensor:
    return torch.stack([source[s : s + length] for s in starts.tolist()]).to(device)


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
    step = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
    for _ in range(new):
        token = step.logits[:, -1].argmax(-1)
        token = torch.where(done, end, token)
        done = done | (token == end)
        out.append(token[:, None])
        step = model(input_ids=token[:, None], past_key_values=step.past_key_values, use_cache=True)
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
                drafter.context(states[rows]),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="seconds on a CPU: does every stage run?")
    parser.add_argument("--full-attention", action="store_true", help="the small Qwen3 pair instead of the hybrid one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, help="seed of batches and prompts, if not --seed (which picks the corpus)")
    parser.add_argument("--corpus-mb", type=float, default=80)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--target-steps", type=int, default=1100)
    parser.add_argument("--target-lr", type=float, default=3e-3)
    parser.add_argument("--target-inner", type=int)
    parser.add_argument("--resume", type=Path, help="start the drafter from this checkpoint")
    parser.add_argument("--target", type=Path, help="use this trained target and train drafters only")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 48, 64, 96], help="prompt lengths in tokens")
    parser.add_argument("--total", type=int, default=176, help="tokens of a prompt with its continuation")
    parser.add_argument("--sequences", type=int, default=160_000)
    parser.add_argument("--generate-batch", type=int, default=4096)
    parser.add_argument("--draft-steps", type=int, default=6500)
    parser.add_argument("--draft-batch", type=int, default=192)
    parser.add_argument("--draft-lr", type=float, default=1.5e-3)
    parser.add_argument("--draft-layers", type=int)
    parser.add_argument("--draft-inner", type=int)
    parser.add_argument("--draft-every", type=int, default=500)
    parser.add_argument("--anchors", type=int, default=32)
    parser.add_argument("--distinct", type=float, default=0.6, help="least share of distinct 8-grams of a continuation")
    args = parser.parse_args()
    args.shape = FULL if args.full_attention else HYBRID
    args.target_inner = args.target_inner or args.shape.inner
    args.draft_inner = args.draft_inner or args.shape.inner
    args.draft_layers = args.draft_layers or args.shape.draft_layers
    if args.smoke:
        args.corpus_mb, args.batch, args.target_steps, args.sequences, args.generate_batch = 1, 4, 6, 32, 32
        args.total = 128
        args.draft_steps, args.draft_batch, args.anchors, args.draft_every, args.length = 8, 8, 4, 4, 96
        args.distinct = 0.0  # an untrained target does nothing but loop
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draws = args.seed if args.draws is None else args.draws
    torch.manual_seed(draws)
    random.seed(draws)
    torch.set_float32_matmul_precision("high")
    target = args.out / "target"
    target.mkdir(parents=True, exist_ok=True)
    say(
        "command: python",
        " ".join(sys.argv),
        "| torch",
        torch.__version__,
        "| device",
        torch.cuda.get_device_name() if device == "cuda" else "cpu",
    )

    sources = collect(int(args.corpus_mb * 1e6), args.seed)
    (args.out / "corpus.tsv").write_text(manifest(sources))
    texts = [source.text for source in sources]
    cut = len(texts) // 50 + 1
    if args.target:
        shutil.copytree(args.target, target, dirs_exist_ok=True)
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(texts[cut : cut + 4000], target, args.shape.vocab)
    end = tokenizer.token_to_id(END)
    held, held_begins = encode(tokenizer, texts[:cut], end)
    ids, begins = encode(tokenizer, texts[cut:], end)
    say(f"corpus {len(sources)} files, {sum(map(len, texts)) / 1e6:.1f} MB, {len(ids) / 1e6:.2f}M training tokens")

    if args.target:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).to(device).eval()
    else:
        model = make_target(ids, held, args, device, end)
        model.save_pretrained(target)

    held_out = regenerate(model, held, held_begins, 32 if args.smoke else 512, args, device, end)
    for row, length in zip(held_out[0][:4], held_out[1][:4].tolist(), strict=True):
        say("held-out continuation:\n" + tokenizer.decode(row[length:].tolist()))
    made = regenerate(model, ids, begins, args.sequences, args, device, end)
    train_drafter(model, made, held_out, args, device, end)
    (args.out / "training.log").write_text("\n".join(LOG) + "\n")
    shutil.rmtree(args.out / "target" / "__pycache__", ignore_errors=True)
    say("done")


if __name__ == "__main__":
    main()
