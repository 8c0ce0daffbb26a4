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
import random
import shutil
import sys
from pathlib import Path

sys.modules["fla"] = None  # type: ignore[assignment]  # transformers binds fla by import; see above
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tools.corpus import collect, manifest  # noqa: E402
from tools.pair.drafter import train_drafter  # noqa: E402
from tools.pair.log import LOG, say  # noqa: E402
from tools.pair.shapes import END, FULL, HYBRID  # noqa: E402
from tools.pair.target import make_target, regenerate  # noqa: E402
from tools.pair.text import encode, train_tokenizer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="half a minute on a CPU: does every stage run?")
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
        args.corpus_mb, args.batch, args.target_steps, args.length = 0.3, 2, 2, 64
        args.prompts, args.total, args.sequences, args.generate_batch = [32], 48, 8, 8
        args.draft_steps, args.draft_batch, args.anchors, args.draft_every = 2, 4, 4, 1
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

    held_out = regenerate(model, held, held_begins, 8 if args.smoke else 512, args, device, end)
    for row, length in zip(held_out[0][:4], held_out[1][:4].tolist(), strict=True):
        say("held-out continuation:\n" + tokenizer.decode(row[length:].tolist()))
    made = regenerate(model, ids, begins, args.sequences, args, device, end)
    train_drafter(model, made, held_out, args, device, end)
    (args.out / "training.log").write_text("\n".join(LOG) + "\n")
    shutil.rmtree(args.out / "target" / "__pycache__", ignore_errors=True)
    say("done")


if __name__ == "__main__":
    main()
