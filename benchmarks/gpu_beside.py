"""Jobs beside a running server on this machine's own GPU: the ceiling counts the CUDA context, who is over it is ended.

    python -m benchmarks.gpu_beside [--gib 40] [--ceiling 4096] [--simulated]

As gpu_window, but the server is never stopped. Three jobs: one with a CUDA context and nothing else, one below the
ceiling, one that takes twice of it. --simulated: the same over simulated GPUs. The last line is JSON: MiB that each job
added to the GPU, seconds until the last one was ended and its memory was free, whether the server kept its start.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_window import this_machine  # noqa: E402
from taugate.errors import TaugateError, WindowError  # noqa: E402
from taugate.host.beside import BesideWindow, Ceiling  # noqa: E402
from taugate.host.host import Host  # noqa: E402
from taugate.host.record import WindowSettings  # noqa: E402
from taugate.polling import poll  # noqa: E402

_REAL = """import sys, time, torch
x = torch.empty(max(1, int(sys.argv[1])) << 20, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holding", flush=True)
time.sleep(float(sys.argv[2]))"""
_SIMULATED = """import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from fixtures.embedded import gpus
held = gpus.hold(Path(sys.argv[4]), int(sys.argv[1]), 0)
print("holding", flush=True)
time.sleep(float(sys.argv[2]))"""


class Meter:
    """What jobs add to the chosen GPU."""

    def __init__(self, host: Host, window: BesideWindow, program: list[str], tail: list[str]) -> None:
        self.host, self.window, self.program, self.tail = host, window, program, tail
        self.base = self.used()

    def used(self) -> int:
        return self.host.gpus().by_uuid()[self.window.gpu.uuid].used_mib

    def run(self, mib: int, seconds: float) -> dict[str, Any]:
        """One job that takes `mib` for `seconds`; added_mib is measured as soon as it says that it holds them."""
        seen: dict[str, Any] = {"mib": mib, "ended": ""}

        def look() -> None:
            seen["added_mib"] = self.used() - self.base
            seen["held_at"] = time.monotonic()

        threads: list[threading.Thread] = []

        def on_line(_: str) -> None:
            threads.append(threading.Thread(target=look))
            threads[-1].start()

        try:
            argv = [*self.program, str(mib), str(seconds), *self.tail]
            done = self.window.run_job(argv, deadline_s=90, on_line=on_line)
            if done.rc:
                raise TaugateError(f"the job of {mib} MiB ended with {done.rc}: {done.stderr[-500:]}")
        except WindowError as error:
            seen["ended"] = str(error)
        for thread in threads:
            thread.join()
        poll(lambda: self.used() <= self.base + 16, deadline=30, what="the job's memory", interval=0.1)
        begun = seen.pop("held_at", None)
        seen["until_free_s"] = round(time.monotonic() - begun, 2) if begun else None
        print(json.dumps(seen), flush=True)
        return seen


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_beside", description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, default=40, help="what the server holds")
    parser.add_argument("--ceiling", type=int, default=4096, help="MiB for the jobs")
    parser.add_argument("--simulated", action="store_true", help="simulated GPUs")
    given = parser.parse_args()
    ceiling = Ceiling(mib=800 if given.simulated else given.ceiling, spare_mib=512)
    try:
        with tempfile.TemporaryDirectory(prefix="taugate-beside-") as folder:
            place = Path(folder) / "host"
            with this_machine(place, given.gib, False, given.simulated) as host:
                before = host.unit.show().invocation_id
                code = _SIMULATED if given.simulated else _REAL
                tail = [str(Path(__file__).resolve().parents[1]), str(place / "dev")] if given.simulated else []
                window = BesideWindow(host, WindowSettings(tuple(range(1, 17)), ttl_s=120), ceiling)
                with window:
                    meter = Meter(host, window, [sys.executable, "-c", code], tail)
                    jobs = [meter.run(mib, seconds) for mib, seconds in
                            ((0, 2), (ceiling.mib // 4, 3), (ceiling.mib * 2, 60))]  # fmt: skip
                same = host.unit.show().invocation_id == before and host.server.ready()
    except TaugateError as error:
        print(f"gpu_beside: {error}", file=sys.stderr)
        return 1
    right = same and not jobs[0]["ended"] and not jobs[1]["ended"] and "over the ceiling" in jobs[2]["ended"]
    facts = {"ceiling_mib": ceiling.mib, "outcome": window.record.outcome, "server_kept": same, "right": right}
    print(json.dumps(facts | {"simulated": given.simulated, "jobs": jobs}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
