"""How many Triton kernels were compiled, and how many came ready from the cache, counted by Triton's own listener."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Compilations:
    """Names of the kernels that were compiled, one entry for each variant, and the number read from the cache."""

    compiled: list[str] = field(default_factory=list)
    cached: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"compiled": len(self.compiled), "cached": self.cached, "kernels": sorted(set(self.compiled))}


def share_autotuning() -> None:
    """Let Triton keep the timings of its autotuner in its cache directory, so that every process picks the same
    configurations; has to come before Triton is imported. fla's own switch for its kernels is set as well.
    """
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    os.environ.setdefault("FLA_CACHE_RESULTS", "1")


@contextmanager
def counted_compilations(triton_runs: bool) -> Iterator[Compilations]:
    """Count within the body. triton_runs: whether Triton is used at all; importing it takes seconds otherwise."""
    count = Compilations()
    if not triton_runs or importlib.util.find_spec("triton") is None:
        yield count
        return
    from triton import knobs

    before = knobs.compilation.listener

    def listener(**event: Any) -> None:
        if event["cache_hit"]:
            count.cached += 1
        else:
            source = event["src"]
            count.compiled.append(getattr(getattr(source, "fn", source), "__name__", str(source)))
        if before is not None:
            before(**event)

    knobs.compilation.listener = listener
    try:
        yield count
    finally:
        knobs.compilation.listener = before
