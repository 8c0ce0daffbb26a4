"""Random schedules of faults over windows on systemd hosts. Needs root on Linux.

    python -m benchmarks.window_schedules [--examples 200] [--jobs 3] [--seed 0] [--ledger FILE] [--seconds N]

With a ledger, what ran before is kept there and not played again, so that the schedules can be played in several
runs; --seconds begins no new batch after so long. The last line is JSON over all of them: examples, violations,
seconds. Exit 1 on a violation, 3 if some are still to be played.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fixtures.testhost.rootfs import rootfs  # noqa: E402
from fixtures.testhost.schedules import run_schedules  # noqa: E402

_BATCH = 5  # schedules on one host


def play(number: int) -> dict[str, Any]:
    """One batch on a host of its own."""
    begun, wrong = time.monotonic(), ""
    try:
        run_schedules(_BATCH, number)
    except Exception:
        wrong = traceback.format_exc(limit=6)
    return {"seed": number, "examples": _BATCH, "violation": wrong, "seconds": round(time.monotonic() - begun, 1)}


def play_all(seeds: list[int], jobs: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Batches as they end, `jobs` at once; none begins after `seconds`."""
    end, left = time.monotonic() + seconds, list(seeds)
    with ProcessPoolExecutor(jobs) as pool:
        running: set[Future[dict[str, Any]]] = set()
        while running or (left and time.monotonic() < end):
            while left and len(running) < jobs and time.monotonic() < end:
                running.add(pool.submit(play, left.pop(0)))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def main() -> int:
    parser = argparse.ArgumentParser(prog="window_schedules", description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=3, help="hosts at once")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--ledger", type=Path, help="JSON lines, one per batch played")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no batch after so long")
    given = parser.parse_args()
    rootfs()
    wanted = range(given.seed, given.seed + -(-given.examples // _BATCH))
    known = given.ledger.read_text().splitlines() if given.ledger and given.ledger.exists() else []
    played = {batch["seed"]: batch for batch in map(json.loads, known) if batch["seed"] in wanted}
    for batch in play_all([seed for seed in wanted if seed not in played], given.jobs, given.seconds):
        played[batch["seed"]] = batch
        print(f"seed {batch['seed']}: {batch['violation'] or f'{_BATCH} schedules'} ({batch['seconds']} s)", flush=True)
        if given.ledger:
            with open(given.ledger, "a") as ledger:
                ledger.write(json.dumps(batch) + "\n")
    total = {
        "examples": sum(batch["examples"] for batch in played.values()),
        "violations": sum(bool(batch["violation"]) for batch in played.values()),
        "seconds": round(sum(batch["seconds"] for batch in played.values())),
    }
    print(json.dumps(total))
    return 1 if total["violations"] else 3 if len(played) < len(wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
