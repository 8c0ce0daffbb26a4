"""Random schedules of faults over windows on systemd hosts. Needs root on Linux.

    python -m benchmarks.window_schedules [--examples 200] [--jobs 3] [--seed 0]

The last line is JSON: examples, violations, seconds. Exit 1 on a violation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fixtures.testhost.rootfs import rootfs  # noqa: E402
from fixtures.testhost.schedules import run_schedules  # noqa: E402

_BATCH = 10


def play(number: int) -> str:
    """One batch on a host of its own; "" or what went wrong."""
    try:
        run_schedules(_BATCH, number)
    except Exception:
        return traceback.format_exc(limit=4)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="window_schedules", description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=3, help="hosts at once")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rootfs()
    begun, violations = time.monotonic(), 0
    batches = range(given.seed, given.seed + -(-given.examples // _BATCH))
    with ProcessPoolExecutor(given.jobs) as pool:
        for number, wrong in zip(batches, pool.map(play, batches), strict=True):
            violations += bool(wrong)
            print(f"seed {number}: {wrong or f'{_BATCH} schedules'}", flush=True)
    seconds = round(time.monotonic() - begun)
    print(json.dumps({"examples": len(batches) * _BATCH, "violations": violations, "seconds": seconds}))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
