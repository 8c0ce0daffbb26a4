"""How fast the replay is: against `dflash_generate`, against its own forwards, in its growth, on a GPU.

    python benchmarks/replay.py                    the rows that need no GPU
    python benchmarks/replay.py --device cuda      a drafter of the real Qwen3.6-27B-DFlash shape, random
    weights

Progress on stderr; the last line of stdout is JSON. On a CPU everything runs on one thread, both sides alike.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # its kernels do not run on a CPU

import torch  # noqa: E402

from benchmarks.replay_gpu import EVERYTHING, forwards, real_shape  # noqa: E402
from benchmarks.replay_pair import FIXTURES, FullAttentionPair, random_states  # noqa: E402
from taugate.drafter.replay import Verifier, anchor_table, walk_together  # noqa: E402

CHAIN = Verifier.parse("chain")
ANCHORS_PER_BATCH = 32


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process, of one thread: what others do on the machine matters little then."""
    start = time.process_time()
    out = work()
    return time.process_time() - start, out


def against_the_public_tool(pair: FullAttentionPair, prompts: int, new: int, kept: Path | None) -> dict[str, Any]:
    """Chained τ of the same checkpoint on the same prompts: dflash_generate, and the replay from cached states.

    kept: where the public tool's lengths and seconds are noted prompt by prompt, and found again by the next run.
    """
    texts = pair.prompts(prompts)
    runs = public_runs(pair, texts, new, kept)
    generate_s, wanted = sum(run["seconds"] for run in runs), [run["lengths"] for run in runs]
    complete_s, sequences = seconds(lambda: pair.complete(texts, new))
    capture_s, items = seconds(lambda: [(s, pair.states(s)) for s in sequences])
    replay_s, walked = seconds(lambda: list(walk_together(pair.drafter, iter(items), pair.embedding, pair.head, CHAIN)))
    found = [[cycle.emitted for cycle in cycles] for _, cycles in walked]
    same = sum(a == b for a, b in zip(wanted, found, strict=True))
    cycles = sum(map(len, wanted))
    say(f"{prompts} prompts × {new} tokens, {cycles} cycles, {same} prompts with equal lengths")
    return {
        "replay_speedup": generate_s / replay_s,
        "pair": pair.name,
        "prompts": prompts,
        "tokens": sum(map(sum, wanted)),
        "tau": sum(map(sum, wanted)) / cycles,
        "prompts_with_equal_lengths": same,
        "dflash_generate_s": generate_s,
        "replay_s": replay_s,
        "completions_s": complete_s,
        "capture_s": capture_s,
        "whole_speedup_1_checkpoint": generate_s / (complete_s + capture_s + replay_s),
        "whole_speedup_10_checkpoints": 10 * generate_s / (complete_s + capture_s + 10 * replay_s),
    }


def public_runs(pair: FullAttentionPair, texts: list[list[int]], new: int, kept: Path | None) -> list[dict[str, Any]]:
    """Acceptance lengths and seconds of dflash_generate for each prompt."""
    lines = kept.read_text().splitlines() if kept and kept.exists() else []
    runs = [run for run in map(json.loads, lines) if run["new"] == new][: len(texts)]
    for ids in texts[len(runs) :]:
        spent, run = seconds(lambda ids=ids: pair.dflash_generate(ids, new))
        runs.append({"new": new, "seconds": spent, "lengths": run.acceptance_lengths})
        if kept:
            with open(kept, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(runs[-1]) + "\n")
    return runs


def table_overhead(pair: FullAttentionPair, prompts: int, new: int, rounds: int = 15) -> dict[str, Any]:
    """Table mode with every verifier against its own forwards; the median of alternating rounds, since CPUs
    are shared.
    """
    sequences = pair.complete(pair.prompts(prompts), new)
    items = [(s, pair.states(s)) for s in sequences]

    def alone() -> None:
        for sequence, taps in items:
            forwards(pair.drafter, sequence, taps, pair.embedding, pair.head, ANCHORS_PER_BATCH)

    def table() -> None:
        for sequence, taps in items:
            anchor_table(pair.drafter, sequence, taps, pair.embedding, pair.head, EVERYTHING, ANCHORS_PER_BATCH)

    alone(), table()  # the first of each meets memory that it has to be given
    both = [(seconds(alone)[0], seconds(table)[0]) for _ in range(rounds)]
    forward_s, table_s = (median(column) for column in zip(*both, strict=True))
    return {
        "table_over_forwards": median(t / f for f, t in both),
        "forwards_s": forward_s,
        "table_s": table_s,
        "verifiers": len(EVERYTHING),
    }


def growth(prompts: int, new: int, window: int | None) -> dict[str, Any]:
    """One walk over random states: time per token and peak memory. Run in a process of its own.

    window: of both layers; None for layers that see the whole context, whose work per token grows with its length.
    """
    drafter, embedding, head = random_states.drafter(window)
    items = random_states.stream(drafter, embedding, head, prompts, new)
    spent, walked = seconds(lambda: list(walk_together(drafter, items, embedding, head, CHAIN, prompts_per_batch=16)))
    tokens = sum(cycle.emitted for _, cycles in walked for cycle in cycles)
    # Not getrusage's, which counts the process that started this one, too.
    told = Path("/proc/self/status").read_text(encoding="ascii").split("VmHWM:")[1]
    peak = int(told.split()[0]) / 1024
    return {
        "prompts": prompts, "new_tokens": new, "window": window, "us_per_token": 1e6 * spent / tokens, "peak_mib": peak,
    }  # fmt: skip


def in_a_process(prompts: int, new: int, window: int | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--growth", str(prompts), str(new), str(window or 0)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(out.stdout.splitlines()[-1])
    say("growth", found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--real-shape", action="store_true", help="the rows of --device cuda, on a CPU too (with --quick)"
    )
    parser.add_argument("--pair", type=Path, default=FIXTURES / "qwen3", help="directory with target/ and drafter/")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens per prompt")
    parser.add_argument("--only", choices=("public", "table", "growth"), help="a part of the rows that need no GPU")
    parser.add_argument("--keep", type=Path, help="file of the public tool's runs, so that they can be interrupted")
    parser.add_argument("--quick", action="store_true", help="small sizes: does every row run?")
    parser.add_argument(
        "--growth", type=int, nargs=3, metavar=("PROMPTS", "TOKENS", "WINDOW"),
        help="one row of the growth table; WINDOW 0 for full attention",
    )
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    if args.real_shape or args.device == "cuda":
        print(json.dumps(real_shape(say, args.device, quick=args.quick)))
        return
    if args.growth:
        print(json.dumps(growth(*args.growth[:2], args.growth[2] or None)))
        return
    prompts, tokens = (4, 24) if args.quick else (args.prompts, args.tokens)
    result: dict[str, Any] = {}
    if args.only != "growth":
        pair = FullAttentionPair.load(args.pair)
    if args.only in (None, "public"):
        result |= against_the_public_tool(pair, prompts, tokens, args.keep)
        say("against dflash_generate", result)
    if args.only in (None, "table"):
        result |= table_overhead(pair, min(8, prompts), min(96, tokens))
        say("table", result["table_over_forwards"])
    if args.only in (None, "growth"):
        sizes = [(2, 16), (4, 16)] if args.quick else [(16, 256), (64, 256), (256, 256), (16, 1024), (16, 4096)]
        result["growth"] = [in_a_process(*size, window) for window in (128, None) for size in sizes]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
