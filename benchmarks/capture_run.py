"""One capture in a process of its own, for benchmarks/capture.py: times, memory, and a hash of the states, as JSON.

Also the peer: the same prompts in one batch through transformers with `device_map` "disk" for every layer (accelerate).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from taugate.target.capture import Capture, SequenceDone  # noqa: E402
from taugate.target.kernels import kernel_path  # noqa: E402

MIB = 1 << 20


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """The same token ids for every run."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, vocabulary, (count, length), generator=generator).tolist()


def ours(args: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """Capture the prompts `repeats` times; the first is reported apart, since it loads kernels."""
    begun = time.monotonic()
    capture = Capture(
        args.model, args.path, args.dtype, args.device, args.taps, final_hidden=args.final, engine=args.engine,
        max_gpu_memory=args.max_mib,
    )  # fmt: skip
    setup, walls, hashes, states = time.monotonic() - begun, {}, {}, {}
    with kernel_path(args.path, capture.model_type, args.device) as ran:
        for count in args.prompts:
            sequences = prompts(count, args.length, vocabulary)
            walls[count] = []
            for _ in range(args.repeats):
                start, states = time.monotonic(), {}
                for event in capture.states(sequences):
                    if isinstance(event, SequenceDone):
                        states[event.index] = event.tensors
                walls[count].append(round(time.monotonic() - start, 3))
            hashes[count] = digest(states)
        if args.profile:
            profiled(capture, prompts(2, args.length, vocabulary))
    if args.save:
        torch.save(states, args.save)
    cuda = args.device != "cpu"
    return {
        "setup_s": round(setup, 2), "walls_s": walls, "states": hashes, "facts": capture.facts(),
        "kernels": sorted(ran.require()["calls"]),
        "peak_allocated_mib": [torch.cuda.max_memory_allocated(n) // MIB for n in range(torch.cuda.device_count())],
        "peak_reserved_mib": torch.cuda.max_memory_reserved() // MIB if cuda else 0,
    }  # fmt: skip


def digest(states: dict[int, dict[str, torch.Tensor]]) -> str:
    """Beginning of a hash over all states."""
    found = hashlib.sha256()
    for index in sorted(states):
        for name in sorted(states[index]):
            found.update(states[index][name].view(torch.int16).numpy().data)
    return found.hexdigest()[:16]


def profiled(capture: Capture, sequences: list[list[int]]) -> None:
    """Where the GPU's time goes, on stderr."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        list(capture.states(sequences))
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=32, max_name_column_width=60),
          file=sys.stderr)  # fmt: skip


def peer(args: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """accelerate's disk offload: the first `depth` layers, every prompt in one batch, hidden states of all layers."""
    from transformers import AutoModel

    from taugate.target.resident import _RENAMED
    from taugate.target.skeleton import text_model_config

    config = text_model_config(Path(args.model), max(args.taps) + 1)
    begun = time.monotonic()
    here = 0 if args.device == "cuda" else args.device
    places: dict[str, Any] = {"embed_tokens": here, "norm": here, "rotary_emb": here}
    places |= {f"layers.{layer}": "disk" for layer in range(max(args.taps) + 1)}
    model = AutoModel.from_pretrained(
        args.model, config=config, dtype=torch.bfloat16, device_map=places, offload_folder=args.offload,
        key_mapping=_RENAMED, local_files_only=True, attn_implementation="sdpa",
    ).eval()  # fmt: skip
    setup, walls = time.monotonic() - begun, []
    ids = torch.tensor(prompts(args.prompts[0], args.length, vocabulary), device=args.device)
    for _ in range(args.repeats):
        start = time.monotonic()
        with torch.inference_mode(), kernel_path(args.path, config.model_type, args.device):
            out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
        out.hidden_states[-1].cpu()  # waits for all of it
        walls.append(time.monotonic() - start)
    return {"setup_s": round(setup, 2), "walls_s": {args.prompts[0]: [round(wall, 3) for wall in walls]}}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", default="streamed", choices=["streamed", "resident", "auto", "offload"])
    parser.add_argument("--path", default="fla")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--taps", type=numbers, required=True)
    parser.add_argument("--no-final", dest="final", action="store_false")
    parser.add_argument("--prompts", type=numbers, default=[4], help="how many, one pass after the other")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-mib", type=int)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--offload", default="/dev/shm/offload")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    config = json.loads((Path(args.model) / "config.json").read_text())
    vocabulary = (config.get("text_config") or config)["vocab_size"]
    print(json.dumps((peer if args.engine == "offload" else ours)(args, vocabulary)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
