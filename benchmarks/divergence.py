"""How far fla and the PyTorch fallback are from float64, layer by layer, at the shape of Qwen3.6-27B.

    python benchmarks/divergence.py [--layers 64] [--tokens 512] [--device cuda]

Random weights at full width (5120; 16/48 Gated DeltaNet heads of 128, 24/4 attention heads of 256), bfloat16, one
sequence. Every layer is run on the reference's input, and the whole model freely, on both paths; the reference runs in
float64 on the same device, one layer at a time. 64 layers take 52 GB of GPU memory and 10 GB for states; on a CPU give
--small, which runs a model of three small layers with interpreted kernels. Random weights amplify: what piles up is a
worst case, and the ratio between the paths is what carries over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from taugate.numerics.kernels import open_kernels  # noqa: E402
from taugate.report.numerics import divergence_lines  # noqa: E402
from taugate.target.levels import Batch, Divergence, diverge  # noqa: E402
from taugate.target.paths import PATHS, on_path  # noqa: E402
from taugate.target.random_model import SHAPE_27B, SMALL, random_model  # noqa: E402
from taugate.target.reference import Reference  # noqa: E402


def run(sizes: dict, tokens: int, device: str, dtype: str, seed: int) -> dict[str, Divergence]:
    """Both paths on one random sequence."""
    import torch

    model = random_model(sizes, seed, dtype, device)
    reference = Reference.from_model(model)
    ids = torch.randint(1, sizes["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(seed)).tolist()
    found = {}
    with open_kernels(device) as kernels:
        name = "bf16" if dtype == "bfloat16" else "fp32" if device == "cpu" else "tf32"
        for path in PATHS:
            start = time.monotonic()
            with on_path(model, path, kernels, name) as calls:
                found[path] = diverge(reference, model, path, [Batch(ids)], name)
            print(f"{path}: {time.monotonic() - start:.1f} s, {dict(calls)}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64, help="a multiple of 4 (default 64)")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="three small layers, for a CPU")
    args = parser.parse_args()
    sizes = SMALL if args.small else SHAPE_27B | {"layer_types": SHAPE_27B["layer_types"] * (args.layers // 4)}
    found = run(sizes, args.tokens, args.device, args.dtype, args.seed)
    title = "small" if args.small else f"27B shape, {args.layers} layers"
    print("\n".join(divergence_lines([divergence.record(title) for divergence in found.values()])))
    fla, torch = found["fla"], found["torch"]
    local = [a / b for a, b in zip(fla.mixer, torch.mixer, strict=True)]
    moved = [a / b for a, b in zip(fla.propagated, torch.propagated, strict=True)]
    summary = {
        "layers": len(fla.kinds), "tokens": args.tokens, "dtype": fla.dtype,
        "mixer_worst": {path: max(d.mixer) for path, d in found.items()},
        "mixer_ratio": [min(local), max(local)], "propagated_ratio": [min(moved), max(moved)],
        "final_hidden": {path: d.final_hidden for path, d in found.items()},
    }  # fmt: skip
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
