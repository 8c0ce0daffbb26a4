"""The implementations of the gated delta rule under test, called by name, wherever they can run here.

fla-chunk, fla-recurrent    fla's Triton kernels: on a GPU, or interpreted on a CPU in a process of their own
torch-chunk, torch-recurrent  the fallbacks of transformers, on any device

    with open_kernels("cpu") as kernels:
        out, state = kernels.run("fla-chunk", Inputs(q, k, v, g, beta))
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any

from taugate.errors import KernelPathError

if TYPE_CHECKING:
    from torch import Tensor

FLA_PATHS = ("fla-chunk", "fla-recurrent")
TORCH_PATHS = ("torch-chunk", "torch-recurrent")
PATHS = (*FLA_PATHS, *TORCH_PATHS)
DTYPES = ("fp32", "tf32", "bf16")
_MODELING = "transformers.models.qwen3_5.modeling_qwen3_5"


@dataclass(frozen=True)
class Inputs:
    """Arguments of one gated delta rule. Shapes as in `reference.gated_delta_rule`.

    q, k, v and beta are in the dtype under test, g and initial_state in float32, as models call it. l2norm: q and k
    are normalised by the kernel. chunk_size is for the chunk paths.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: tuple[int, ...] | None = None
    l2norm: bool = True
    chunk_size: int = 64

    def to(self, device: str) -> Inputs:
        """The same on another device."""
        names = ("q", "k", "v", "g", "beta", "initial_state")
        return replace(self, **{name: x.to(device) for name in names if (x := getattr(self, name)) is not None})


def call(path: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Run one path in this process: output in the dtype of q and final state in float32.

    Raises KernelPathError for an unknown path, and for packed sequences on a torch path, which cannot keep them apart.
    """
    import torch

    function = _function(path)
    kwargs: dict[str, Any] = {"g": inputs.g, "beta": inputs.beta, "initial_state": inputs.initial_state}
    kwargs |= {"output_final_state": True, "use_qk_l2norm_in_kernel": inputs.l2norm}
    if path.endswith("chunk"):
        kwargs["chunk_size"] = inputs.chunk_size
    if inputs.cu_seqlens is not None:
        if path in TORCH_PATHS:
            raise KernelPathError(f"{path} cannot keep packed sequences apart; call it for one at a time")
        kwargs["cu_seqlens"] = torch.tensor(inputs.cu_seqlens, dtype=torch.long, device=inputs.q.device)
    q, k = inputs.q, inputs.k
    if path in TORCH_PATHS and "num_k_heads" not in function.__code__.co_varnames:
        # Before it grouped heads by itself (transformers 5.17 does not), the layer around it repeated them.
        q, k = (x.repeat_interleave(inputs.v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    with torch.no_grad():
        out, state = function(q, k, inputs.v, **kwargs)
    return out, state


def _function(path: str) -> Callable[..., Any]:
    if path in TORCH_PATHS:
        function = getattr(importlib.import_module(_MODELING), f"torch_{path.removeprefix('torch-')}_gated_delta_rule")
        return inspect.unwrap(function)  # the decorated one calls fla wherever that imports
    if path in FLA_PATHS:
        name = {"fla-chunk": "chunk", "fla-recurrent": "fused_recurrent"}[path]
        return getattr(importlib.import_module("fla.ops.gated_delta_rule"), f"{name}_gated_delta_rule")
    raise KernelPathError(f"there is no path {path!r} of the gated delta rule; there are {', '.join(PATHS)}")


class Worker:
    """A process that runs fla's kernels one way: "interpreted" on a CPU, or on a GPU with float32 dots in "ieee" or
    "tf32" arithmetic, in all of them with one configuration for each kernel instead of autotuning.

    None of this can be had in this process without changing Triton for everything else in it.
    """

    def __init__(self, way: str) -> None:
        """Starts at once, answers after seconds. Raises KernelPathError, from the first `run` on, if it cannot."""
        changed = {"interpreted": {"TRITON_INTERPRET": "1"}, "ieee": {"TRITON_F32_DEFAULT": "ieee"}, "tf32": {}}[way]
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.launches: Counter[str] = Counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "taugate.numerics.worker", way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | changed | {"PYTHONPATH": paths},
        )

    def run(self, path: str, inputs: Inputs, tf32: bool = False) -> tuple[Tensor, Tensor]:
        """As `call`, with tensors of the CPU. tf32: emulate the TF32 dots of a GPU (interpreted only).

        Raises KernelPathError with the worker's reason.
        """
        assert self._process.stdin and self._process.stdout
        try:
            send(self._process.stdin, {"path": path, "tf32": tf32, **vars(inputs)})
            answer = receive(self._process.stdout)
        except (BrokenPipeError, EOFError):
            code = self._process.wait()
            raise KernelPathError(f"the process that runs fla's kernels ended with code {code}, see above") from None
        if "error" in answer:
            raise KernelPathError(answer["error"])
        self.launches = Counter(answer["launches"])
        return answer["out"], answer["state"]

    def close(self) -> None:
        """End the process, which has nothing to save."""
        self._process.kill()
        with suppress(BrokenPipeError):  # from what it no longer reads
            self._process.communicate()


class Kernels:
    """Every path on one device, and what "fp32", "tf32" and "bf16" mean there.

    fp32 is IEEE arithmetic. tf32 and bf16 are what a GPU does by default (in bf16 too, fla has a few TF32 dots):
    emulated where fla is interpreted.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._workers: dict[str, Worker] = {}

    def run(self, path: str, inputs: Inputs, dtype: str | None = None) -> tuple[Tensor, Tensor]:
        """Output and final state of a path. dtype tells "tf32" from "fp32" for float32 inputs; IEEE unless given."""
        dtype = dtype or ("bf16" if inputs.q.element_size() == 2 else "fp32")
        if path in TORCH_PATHS:
            return call(path, inputs)
        worker = self.worker("interpreted" if self.device == "cpu" else "ieee" if dtype == "fp32" else "tf32")
        out, state = worker.run(path, inputs.to("cpu"), tf32=dtype != "fp32")
        return out.to(inputs.q.device), state.to(inputs.q.device)

    def worker(self, way: str) -> Worker:
        """The worker of one way, started when it is first asked for."""
        if way not in self._workers:
            self._workers[way] = Worker(way)
        return self._workers[way]

    @property
    def launches(self) -> Counter[str]:
        """Launches in the workers so far, by kernel (interpreted) or by path (on a GPU)."""
        return sum((worker.launches for worker in self._workers.values()), Counter())

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


@contextmanager
def open_kernels(device: str | None = None) -> Iterator[Kernels]:
    """All paths on "cpu" or "cuda"; a GPU if there is one unless told. Raises KernelPathError where it is missing."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise KernelPathError('the kernels are to run on "cuda", but torch finds no GPU; leave --device out')
    kernels = Kernels(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        yield kernels
    finally:
        kernels.close()


def send(stream: IO[bytes], message: dict[str, Any]) -> None:
    """Write one message of plain values and tensors."""
    import torch

    buffer = BytesIO()
    torch.save(message, buffer)
    stream.write(struct.pack("<q", buffer.tell()))
    stream.write(buffer.getbuffer())
    stream.flush()


def receive(stream: IO[bytes]) -> dict[str, Any]:
    """Read one message. Raises EOFError at the end of the stream, also in mid-message."""
    import torch

    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<q", head)
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    try:
        return torch.load(BytesIO(body), weights_only=True)
    except pickle.UnpicklingError as error:
        raise EOFError from error
