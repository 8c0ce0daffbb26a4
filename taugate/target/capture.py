"""Hidden states of a target, computed: token ids in, `tap.L` and `final_hidden` out. One sequence per forward, since
batching changes the numbers. Two engines, bit-equal to each other on the same device and kernel path: `resident` and
`streamed`. The job around it is `taugate.target.worker`, which `python -m taugate.target.capture` runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from taugate.files import sha256_file, sha256_json
from taugate.target import memory
from taugate.target.compilations import Compilations, counted_compilations, share_autotuning
from taugate.target.fused import Fused, fused_modules
from taugate.target.progress import LayerDone, SequenceDone

__all__ = ["Capture", "LayerDone", "SequenceDone", "code_sha256", "pick_device"]

ENGINES = ("auto", "resident", "streamed")
# What decides the numbers of a state. A change here makes old states unusable, which is the point.
_DECIDING = """
embedding fused fused_attention fused_forwards fused_kernels graphs implementations kernels lanes layout loading pages
resident segments shards skeleton streamed waiting
"""
CODE = tuple(f"target/{name}.py" for name in _DECIDING.split())


def code_sha256(package: Path) -> str:
    """Hash of the source that computes states; `package` is the directory of the taugate package."""
    return sha256_json([[name, sha256_file(package / name)] for name in CODE])


def pick_device(wanted: str) -> str:
    """ "auto" is a GPU if torch sees one, else the CPU."""
    import torch

    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


class Capture:
    """A target, ready to be run over sequences by one of the engines.

    path: kernel path, see `kernels`; dtype: "bfloat16" or "float32", the precision of the forward (states are stored
    in bfloat16 either way); max_gpu_memory: on each GPU, CUDA context included, in MiB or as "6GiB"; None or "auto" for
    what is free. Raises CheckpointError and GpuMemoryError.
    """

    def __init__(
        self,
        model_path: str,
        path: str,
        dtype: str,
        device: str,
        taps: list[int],
        threads: int | None = None,
        *,
        final_hidden: bool = True,
        engine: str = "auto",
        max_gpu_memory: int | str | None = None,
    ) -> None:
        share_autotuning()
        import torch

        from taugate.target.skeleton import text_model_config

        if threads:
            torch.set_num_threads(threads)
        directory, precision, taps = Path(model_path), getattr(torch, dtype), sorted(set(taps))
        self.model_type: str = text_model_config(directory).model_type
        self.path, self._compilations = path, Compilations()
        self._fused = Fused() if device != "cpu" and path != "torch" else None
        if device != "cpu":
            _hold_allocator()
        limit = memory.parse_limit(max_gpu_memory)
        caps = _caps(limit) if device != "cpu" else []
        if engine == "auto":
            engine = pick_engine(directory, precision, device, taps, final_hidden, caps)
        if engine == "resident":
            from taugate.target.resident import Resident

            self.engine: Any = Resident(directory, precision, device, taps, final_hidden, caps)
        else:
            from taugate.target.streamed import Streamed

            self.engine = Streamed(directory, path, precision, device, taps, final_hidden, limit)

    @classmethod
    def from_spec(cls, spec: dict[str, Any], device: str) -> Capture:
        """The capture that a job's spec describes, see `taugate.target.worker`."""
        return cls(
            spec["model_path"],
            spec["kernel_path"],
            spec["dtype"],
            device,
            spec["taps"],
            spec.get("threads"),
            final_hidden=spec.get("final_hidden", True),
            engine=spec.get("engine", "auto"),
            max_gpu_memory=spec.get("max_gpu_memory"),
        )

    def facts(self) -> dict[str, Any]:
        """What is worth remembering about how the states were computed, as JSON."""
        fused = {"fused": self._fused.facts()} if self._fused else {}
        return {**self.engine.facts(), **fused, "compilations": self._compilations.to_json()}

    def states(self, sequences: Sequence[Sequence[int]]) -> Iterator[LayerDone | SequenceDone]:
        """States of every sequence, each as soon as it is complete, and progress in between."""
        on_gpu = self.path in ("fla", "hub", "flash_qla")
        with ExitStack() as stack:
            self._compilations = stack.enter_context(counted_compilations(on_gpu))
            if self._fused:
                stack.enter_context(fused_modules(self._fused, self.model_type))
            yield from self.engine.states(sequences)

    def __call__(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """States of one sequence: tensors [S, H] in bfloat16 on the CPU, `tap.L` for each tap and `final_hidden`."""
        (done,) = (event for event in self.states([token_ids]) if isinstance(event, SequenceDone))
        return done.tensors


def pick_engine(directory: Path, dtype: Any, device: str, taps: list[int], final: bool, caps: list[int]) -> str:
    """ "resident" on a CPU and wherever the model fits the GPUs, as measured; else "streamed"."""
    if device == "cpu":
        return "resident"
    from taugate.target.layout import open_layout
    from taugate.target.resident import Resident, model_bytes
    from taugate.target.skeleton import needed_depth, text_model_config

    depth = needed_depth(text_model_config(directory).num_hidden_layers, taps, final)
    needed = model_bytes(open_layout(directory), depth, dtype)
    return "resident" if Resident.fits(caps, needed) else "streamed"


def _caps(limit: int | None) -> list[int]:
    """Bytes that this process may hold on each GPU: what is free there and what it holds, at most `limit`."""
    import torch

    caps = []
    for index in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(index)
        caps.append(min(free, limit) if limit else free)
    return caps


def _hold_allocator() -> None:
    """Let torch's allocator grow its segments in place, so that what it holds is what is used; lift an old limit, and
    free what an earlier capture of this process left to the garbage collector.
    """
    import gc

    import torch

    gc.collect()

    if not torch.cuda.is_initialized():
        settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (settings or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    from taugate.target.worker import main

    sys.exit(main())
