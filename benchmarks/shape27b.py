"""A checkpoint of the exact shape of Qwen3.6-27B's text model, with random weights, as bf16 shards of one layer each.

    python benchmarks/shape27b.py --out /dev/shm/qwen27b [--layers 64]

Named and stored as the multimodal checkpoint is: `model.language_model.` in every key, A_log and the gated norm in
fp32, an output head of its own. Tensors are drawn on the GPU if there is one, and written by several threads; every
byte is drawn, nothing is linked.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

TEXT = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "max_position_embeddings": 262144, "tie_word_embeddings": False, "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
                        "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}  # fmt: skip
SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [2, 1, 1]},
}  # fmt: skip
_FP32 = ("linear_attn.A_log", "linear_attn.norm.weight")
_WRITERS = 12


def text_settings(layers: int, small: bool = False) -> dict[str, Any]:
    """config.json's text part, with `layers` layers; small: narrow enough for a CPU."""
    every = TEXT["full_attention_interval"]
    kinds = ["full_attention" if (n + 1) % every == 0 else "linear_attention" for n in range(layers)]
    return {**TEXT, **(SMALL if small else {}), "num_hidden_layers": layers, "layer_types": kinds}


def write_checkpoint(out: Path, layers: int = 64, small: bool = False, device: str | None = None) -> int:
    """Write config, shards and index to `out`; returns the bytes of all shards."""
    from transformers import AutoModel
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    text = text_settings(layers, small)
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
              "tie_word_embeddings": False, "dtype": "bfloat16"}  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModel.from_config(Qwen3_5TextConfig(**text))
    shapes = {f"model.language_model.{key}": tuple(value.shape) for key, value in model.state_dict().items()}
    shapes["lm_head.weight"] = shapes["model.language_model.embed_tokens.weight"]
    files: dict[str, list[str]] = {}
    for key in shapes:
        part = key.split(".")[3] if ".layers." in key else "outer"
        files.setdefault(f"model-{part:0>5}.safetensors", []).append(key)
    with ThreadPoolExecutor(_WRITERS) as pool:
        sizes = list(pool.map(lambda name: _write(out / name, files[name], shapes, device), files))
    index = {"metadata": {}, "weight_map": {key: name for name, keys in files.items() for key in keys}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(sizes)


def _write(path: Path, keys: list[str], shapes: dict[str, tuple[int, ...]], device: str) -> int:
    """One safetensors file; tensor by tensor, so that little is in memory twice."""
    header, offset = {}, 0
    for key in keys:
        dtype, size = ("F32", 4) if key.endswith(_FP32) else ("BF16", 2)
        end = offset + math.prod(shapes[key]) * size
        header[key] = {"dtype": dtype, "shape": list(shapes[key]), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for key in keys:
            generator = torch.Generator(device).manual_seed(zlib.crc32(key.encode()))
            stream.write(_drawn(key, shapes[key], device, generator).cpu().view(torch.uint8).numpy().data)
    return path.stat().st_size


def _drawn(key: str, shape: tuple[int, ...], device: str, generator: torch.Generator) -> torch.Tensor:
    """Random values of the size that a trained model has: norms near one (zero-centred: near nought), decays spread."""
    if key.endswith("A_log"):
        return torch.empty(shape, device=device).uniform_(0.01, 16, generator=generator).log_()
    values = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
    if key.endswith("linear_attn.norm.weight"):
        return values.float() + 1
    if key.endswith("dt_bias"):
        return values + 1
    return values * 10 if key.endswith("conv1d.weight") else values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--small", action="store_true", help="a narrow model, to see on a CPU that all of it runs")
    args = parser.parse_args()
    start = time.monotonic()
    size = write_checkpoint(args.out, args.layers, args.small)
    print(json.dumps({"bytes": size, "layers": args.layers, "seconds": round(time.monotonic() - start, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
