"""What an engine says while it works."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
