"""Compile and autotune the kernels of a capture before the window, into the cache that the capture then uses.

    python -m taugate.target.warmup --spec spec.json

The first calls of fla's kernels take a minute of compiling and timing. Here they run on a model of two layers that has
the target's heads but is 64 wide: the kernels see the same shapes, and the rest takes next to no memory. So it runs
beside a server, with about 1 GB of GPU memory free. Results go to $TRITON_CACHE_DIR; with the timings there as well,
every later process picks the same configurations and compiles nothing. Prints one JSON line.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from taugate.command import Parser, one_sentence
from taugate.errors import CheckpointError, GpuMemoryError
from taugate.target import memory
from taugate.target.capture import pick_device
from taugate.target.compilations import counted_compilations, share_autotuning
from taugate.target.fused import Fused, fused_modules
from taugate.target.kernels import kernel_path
from taugate.target.segments import cache_argument, new_cache, segments

# Triton times each configuration with a buffer of 256 MiB that it writes to empty the L2 cache.
_TIMING = 256 * memory.MIB
_WIDTH = 64


def warm_up(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the kernels over every segment length of the spec's sequences (see `taugate.target.worker`).

    Returns {"event": "done", "compiled", "cached", "seconds", "cache", "needed_mib"}; "skipped" says why there was
    nothing to do. Raises GpuMemoryError when the GPU has too little memory free, KernelPathError.
    """
    device = pick_device(spec["device"])
    path = spec["kernel_path"]
    if device == "cpu" or path == "torch":
        return {"event": "done", "skipped": f"kernel path {path} on {device} compiles nothing", "compiled": 0}
    import torch

    from taugate.target.skeleton import text_model_config

    share_autotuning()
    begun = time.monotonic()
    config = small_config(Path(spec["model_path"]))
    if config is None:
        return {"event": "done", "skipped": "the target has no gated delta rule", "compiled": 0}
    pieces = {tuple(segments(len(s["token_ids"]))) for s in spec["sequences"]}
    longest = max((end - begin for cut in pieces for begin, end in cut), default=0)
    needed = _TIMING + memory.WORKSPACE + memory.scratch_bytes(config, longest, 2, path)
    _require_free(needed)
    with (
        counted_compilations(True) as count,
        kernel_path(path, config.model_type, device) as ran,
        fused_modules(Fused(), config.model_type),
    ):
        model = _model(config, getattr(torch, spec["dtype"]), device)
        _run_norms(model, text_model_config(Path(spec["model_path"])).hidden_size)
        for cut in sorted(pieces, key=len):
            _run(model, config, cut)
        torch.cuda.synchronize()
        if pieces:
            ran.require()
    return {
        "event": "done",
        **count.to_json(),
        "seconds": round(time.monotonic() - begun, 1),
        "cache": os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache"),
        "needed_mib": round(needed / memory.MIB),
    }


def small_config(directory: Path) -> Any | None:
    """The target's config with its heads, 64 wide, one linear and one full attention layer; None without the former."""
    from taugate.target.skeleton import text_model_config

    config = copy.deepcopy(text_model_config(directory))
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    narrow = {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "vocab_size": 8,
        "hidden_size": _WIDTH, "intermediate_size": _WIDTH, "moe_intermediate_size": _WIDTH, "num_experts": 4,
        "shared_expert_intermediate_size": _WIDTH, "num_experts_per_tok": 2, "pad_token_id": None,
    }  # fmt: skip
    for name, value in narrow.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def _model(config: Any, dtype: Any, device: str) -> Any:
    import torch
    from transformers import AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval().requires_grad_(False)


def _run(model: Any, config: Any, cut: tuple[tuple[int, int], ...]) -> None:
    """One sequence in these segments, as the engines run it."""
    import torch

    cache = new_cache(config) if len(cut) > 1 else None
    given = {cache_argument(model.forward): cache} if cache is not None else {}
    with torch.inference_mode():
        for begin, end in cut:
            hidden = torch.randn(1, end - begin, config.hidden_size, device=model.device, dtype=model.dtype)
            model(inputs_embeds=hidden, use_cache=cache is not None, **given)


def _run_norms(model: Any, hidden_size: int) -> None:
    """Norms that the narrow model lacks: of the target's own width, and gated ones that are stored in fp32."""
    import torch

    norm = type(model.norm)(hidden_size).to(model.device, model.dtype)
    gated = model.layers[0].linear_attn.norm
    gated = type(gated)(gated.weight.numel()).to(model.device)
    with torch.inference_mode():
        norm(torch.randn(1, 64, hidden_size, device=model.device, dtype=model.dtype))
        heads = torch.randn(64, gated.weight.numel(), device=model.device, dtype=model.dtype)
        gated(heads, heads)


def _require_free(needed: int) -> None:
    """Raises GpuMemoryError unless the GPU has this much free once the CUDA context is there."""
    import torch

    try:
        free, _ = torch.cuda.mem_get_info()
    except RuntimeError as error:  # not even the context fits
        raise GpuMemoryError(
            f"the kernels cannot be warmed up: the GPU has no room for a CUDA context and {needed // memory.MIB} MiB "
            f"({str(error).splitlines()[0]})"
        ) from None
    if free < needed:
        raise GpuMemoryError(
            f"the kernels cannot be warmed up: that takes {needed // memory.MIB} MiB of GPU memory beside the CUDA "
            f"context, and {free // memory.MIB} MiB are free; free some, or let the capture compile inside the window"
        )


def _result(spec: dict[str, Any], if_it_fits: bool) -> dict[str, Any]:
    try:
        return warm_up(spec)
    except GpuMemoryError as error:
        if not if_it_fits:
            raise
        return {"event": "done", "refused": str(error), "compiled": 0}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m taugate.target.warmup", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="the capture's spec, or one with the same lengths")
    parser.add_argument("--if-it-fits", action="store_true", help="too little GPU memory is told, and is no failure")
    args = parser.parse_args(argv)

    def body() -> int:
        print(json.dumps(_result(_read(args.spec), args.if_it_fits)), flush=True)
        return 0

    return one_sentence(body, lambda sentence: print(json.dumps({"event": "error", "sentence": sentence}), flush=True))


def _read(spec: Path) -> dict[str, Any]:
    try:
        return json.loads(spec.read_text())
    except ValueError as error:
        raise CheckpointError(f"{spec} is no capture spec ({error}); write it again") from None


if __name__ == "__main__":
    sys.exit(main())
