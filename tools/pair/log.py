"""Progress of a training run, on stdout and for training.log."""

from __future__ import annotations

import time

START = time.monotonic()
LOG: list[str] = []


def say(*words: object) -> None:
    line = f"[{time.monotonic() - START:7.1f}] " + " ".join(str(word) for word in words)
    LOG.append(line)
    print(line, flush=True)
