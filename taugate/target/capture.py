"""Hidden states of a target, computed: token ids in, `tap.L` and `final_hidden` out. Batch 1 per forward: batching
changes the numbers. The job around it is `taugate.target.worker`, which `python -m taugate.target.capture` runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taugate.errors import CheckpointError
from taugate.files import sha256_file, sha256_json
from taugate.target.store import FINAL_HIDDEN, tap_name

# What decides the numbers of a state. A change here makes old states unusable, which is the point.
CODE = ("target/capture.py", "target/kernels.py")


@dataclass(frozen=True)
class LayerDone:
    """All prompts went through `layer` of `of`; `bytes` of weights were read for it; `left_s` is an estimate."""

    layer: int
    of: int
    prompts: int
    bytes: int
    left_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SequenceDone:
    """The states of sequence `index`: tensors [S, H] in bfloat16 on the CPU, `tap.L` and `final_hidden`."""

    index: int
    tensors: dict[str, Any]


def code_sha256(package: Path) -> str:
    """Hash of the source that computes states; `package` is the directory of the taugate package."""
    return sha256_json([[name, sha256_file(package / name)] for name in CODE])


def pick_device(wanted: str) -> str:
    """ "auto" is a GPU if torch sees one, else the CPU."""
    import torch

    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


class Capture:
    """The target resident on one device, ready to be run over sequences.

    dtype: "bfloat16" or "float32", the precision of the forward; states are stored in bfloat16 either way.
    """

    def __init__(
        self, model_path: str, path: str, dtype: str, device: str, taps: list[int], threads: int | None = None
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if threads:
            torch.set_num_threads(threads)
        self.device, self.path, self.taps = device, path, taps
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype), local_files_only=True)
        self.model = model.model.to(device).eval().requires_grad_(False)
        layers = len(self.model.layers)
        if outside := [tap for tap in taps if not 0 <= tap < layers]:
            raise CheckpointError(f"taps {outside} are outside the target's layers 0…{layers - 1}")
        self.model_type = model.config.get_text_config().model_type

    @classmethod
    def from_spec(cls, spec: dict[str, Any], device: str) -> Capture:
        """The capture that a job's spec describes, see `taugate.target.worker`."""
        return cls(spec["model_path"], spec["kernel_path"], spec["dtype"], device, spec["taps"], spec.get("threads"))

    def facts(self) -> dict[str, Any]:
        """What is worth remembering about how the states were computed, as JSON."""
        return {"name": "resident"}

    def states(self, sequences: Sequence[list[int]]) -> Iterator[LayerDone | SequenceDone]:
        """States of every sequence, each as soon as it is complete, and progress in between."""
        for index, token_ids in enumerate(sequences):
            yield SequenceDone(index, self(token_ids))

    def __call__(self, token_ids: list[int]) -> dict[str, Any]:
        """Tensors [S, H] in bfloat16 on the CPU: `tap.L` for each tap and `final_hidden`."""
        import torch

        kept: dict[str, torch.Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                kept[tap_name(layer)] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        hooks = [self.model.layers[tap].register_forward_hook(keep(tap)) for tap in self.taps]
        try:
            with torch.inference_mode():
                ids = torch.tensor([token_ids], device=self.device)
                kept[FINAL_HIDDEN] = self.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        finally:
            for hook in hooks:
                hook.remove()
        states = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in kept.items()}
        for name, value in states.items():
            if not torch.isfinite(value).all():
                raise CheckpointError(
                    f"{name} of a sequence of {len(token_ids)} tokens is not finite; nothing was kept"
                )
        return states


if __name__ == "__main__":
    from taugate.target.worker import main

    sys.exit(main())
