"""What a capture takes on a GPU, said before it starts: a ceiling is kept or refused with the number that would do.

A ceiling counts everything that nvidia-smi shows for the process: the CUDA context with its loaded kernels (measured),
layer buffers, activations, and scratch memory of a forward (estimated from the config, with room for the allocator).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taugate.errors import GpuMemoryError

MIB = 1 << 20
# Kernels load lazily: what the context still grows by after its first product (10 MiB on an H200).
LAZY_KERNELS = 24 * MIB
# The cuBLAS workspace of a compute stream (32 MiB on Hopper).
WORKSPACE = 32 * MIB


@dataclass(frozen=True)
class Plan:
    """A streamed capture's use of one GPU, in bytes.

    buffers: for layers; lanes: streams of prompts; graphs: whether launches are recorded; waiting: "gpu" or "host",
    where prompts wait between layers; tables: the GPU's page tables of pinned files.
    """

    buffers: int
    lanes: int
    graphs: bool
    waiting: str
    context: int
    weights: int
    scratch: int
    activations: int
    tables: int

    @property
    def total(self) -> int:
        return self.context + self.weights + self.scratch + self.activations + self.tables

    @property
    def way(self) -> tuple[int, int, bool, str]:
        """What decides the speed."""
        return self.buffers, self.lanes, self.graphs, self.waiting

    def to_json(self) -> dict[str, Any]:
        sizes = {"context", "weights", "scratch", "activations", "tables"}
        return {k: round(v / MIB) if k in sizes else v for k, v in asdict(self).items()} | {
            "total": round(self.total / MIB)
        }


def parse_limit(value: int | str | None) -> int | None:
    """Bytes of a limit as a spec gives it: MiB as a number, "3000 MiB" or "6GiB"; None for None and "auto".

    Raises GpuMemoryError for anything else.
    """
    if value is None or value == "auto":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MiB|GiB)?", str(value))
    if not found or isinstance(value, bool):
        raise GpuMemoryError(f'max_gpu_memory is {value!r}; write "6GiB", "3000 MiB", a number of MiB, or "auto"')
    return int(float(found[1]) * MIB * (1024 if found[2] == "GiB" else 1))


def plan_streaming(
    limit: int, context: int, layer: int, scratch: int, waiting: int, moving: int, reason: str, recorded: float = 1.0,
    outputs: int = 0, tables: int = 0,
) -> Plan:  # fmt: skip
    """The fastest plan within `limit` bytes: two layer buffers before one, then recorded launches, then two lanes.

    layer: bytes of the largest layer; scratch: of one segment's forward; waiting: of all prompts' hidden states;
    moving: of the states of one prompt that are in use at a time; reason: what sets the limit; recorded: scratch of
    recorded launches, which have memory of their own, as a part of that of eager calls; outputs: of the states that
    they keep; tables: of pinned files, see `page_tables`. Raises GpuMemoryError naming the least that would do.
    """
    context += LAZY_KERNELS
    for buffers, lanes, graphs, where in (
        (2, 2, True, "gpu"), (2, 2, True, "host"), (2, 1, True, "gpu"), (2, 1, True, "host"),
        (2, 1, False, "gpu"), (2, 1, False, "host"), (1, 1, False, "gpu"), (1, 1, False, "host"),
    ):  # fmt: skip
        activations = lanes * (moving + (outputs if graphs else 0)) + (waiting if where == "gpu" else 0)
        needed = lanes * (scratch + (int(recorded * scratch) if graphs else 0) + WORKSPACE)
        plan = Plan(buffers, lanes, graphs, where, context, buffers * layer, needed, activations, tables)
        if plan.total <= limit:
            return plan
    least = -(-plan.total // MIB)
    raise GpuMemoryError(
        f"{reason} leaves {limit // MIB} MiB of GPU memory, but a streamed capture of this target needs {least} MiB "
        f"(context {plan.context // MIB}, one layer {layer // MIB}, scratch {plan.scratch // MIB}, "
        f"states {moving // MIB}); "
        f"set capture.max_gpu_memory to {least} MiB or more"
    )


def scratch_bytes(config: Any, tokens: int, itemsize: int, path: str, past: int = 0) -> int:
    """Upper estimate of what one decoder layer's forward over `tokens` tokens holds at once, beside its weights.

    Counted from the modules of transformers: the tensors alive at the widest point of a norm (fp32), the attention, the
    gated delta rule and the MLP, of which only one runs at a time, beside the residual stream. past: tokens before the
    segment, whose keys, values and mask count too.
    """
    hidden = config.hidden_size
    norm = hidden * 3 * 4
    inner = getattr(config, "intermediate_size", 0) or 0
    mlp = 4 * inner * itemsize
    if getattr(config, "num_experts", 0):
        shared = 4 * (getattr(config, "shared_expert_intermediate_size", 0) or 0)
        chosen = config.num_experts_per_tok * (4 * config.moe_intermediate_size + 3 * hidden)
        mlp = max(mlp, (shared + chosen) * itemsize)
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    attention = (6 * queries + 6 * keys) * itemsize
    mixer = 0
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        values = config.linear_num_value_heads
        k = config.linear_num_key_heads * config.linear_key_head_dim
        v = values * config.linear_value_head_dim
        if path == "torch":  # the fallback works in fp32, with the keys repeated for every value head
            core = 12 * v * 4 + 5 * values * 64 * 4
        else:  # normed q and k; w, u, new values, output; per chunk of 64 the matrix A and a copy of the state
            core = (2 * k + 5 * v) * itemsize + values * 64 * 6 + v * config.linear_key_head_dim * itemsize // 64
        mixer = (2 * (2 * k + v) + v) * itemsize + core
    carried = past * (4 * keys * itemsize + 2 * tokens) if past else 0
    return tokens * (hidden * 3 * itemsize + max(norm, mlp, attention, mixer)) + carried


def arguments_bytes(config: Any, lengths: Iterable[int], itemsize: int) -> int:
    """What the layers are called with beside the states, kept for each length: rotary cosines and sines, positions."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return sum(set(lengths)) * (2 * head * itemsize + 4 * 8)


def page_tables(pinned: int) -> int:
    """GPU memory that maps `pinned` bytes of host memory: eight bytes for each page of 4 KiB, and the upper levels."""
    return pinned // 480


def context_bytes() -> tuple[int, int]:
    """What this process holds on the GPU beside torch's memory, and what torch has allocated of that, both after a
    first product; creates the context.

    The former is from nvidia-smi's entry of this process; where that is not told (in some containers), the largest
    context seen on a Hopper GPU with CUDA 13.
    """
    import torch

    _small_stacks()
    square = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    (square @ square).sum().item()
    torch.cuda.synchronize()
    own = process_bytes()
    context = max(own - torch.cuda.memory_reserved(), 256 * MIB) if own is not None else 640 * MIB
    return context, torch.cuda.memory_allocated()


def _small_stacks() -> None:
    """Lower the stack that CUDA reserves for every thread that the GPU can hold, 264 MiB on an H200 by default.

    It serves calls whose depth the compiler does not know; none of the kernels in use makes any. Best effort: what the
    context takes is measured afterwards.
    """
    import ctypes

    import torch

    torch.cuda.current_stream().synchronize()  # the context is there
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(0, ctypes.c_size_t(256))  # CU_LIMIT_STACK_SIZE


def host_bytes() -> int:
    """Memory of this machine that is free or can be freed, by /proc/meminfo; 4 GiB where that is not told."""
    told = Path("/proc/meminfo")
    lines = told.read_text(encoding="ascii").splitlines() if told.is_file() else []
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return int(sizes["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in sizes else 4 << 30


def process_bytes() -> int | None:
    """GPU memory of this process by nvidia-smi, context included; None where it is not told."""
    for line in _smi("--query-compute-apps=pid,used_gpu_memory"):
        pid, _, used = line.partition(",")
        if pid.strip() == str(os.getpid()) and used.strip().isdigit():
            return int(used) * MIB
    return None


def _smi(*args: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, *args, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []
