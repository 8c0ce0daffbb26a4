"""What a window costs beyond the server's own stop and start and the job, on a systemd host. Needs root on Linux.

    python -m benchmarks.window_overhead [--windows 3]

A table per phase in seconds: what it took, how much of that is the server's or the job's own, and what is left. Then
one JSON line: medians, and overhead_s of the downtime and of the whole window. Exit 1 if more than 3 s are left.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fixtures.testhost.host import SERVICE, SystemdHost  # noqa: E402
from taugate.host.host import connect  # noqa: E402
from taugate.host.record import WindowSettings  # noqa: E402
from taugate.host.window import Window  # noqa: E402
from taugate.polling import poll  # noqa: E402

LIMIT_S = 3.0
JOB_S = 1.0
# Phase of the record at whose beginning a step ends -> what the step is.
_STEPS = {
    "serving": "look at the server",
    "leased": "arm the dead-man",
    "stopped": "stop",
    "free": "see the memory free",
    "held": "look at the lease",
    "starting": "job",
    "verified": "start and prove",
    "served": "disarm",
}
_DOWN = ("stopped", "free", "held", "starting", "verified")


@dataclass(frozen=True)
class Step:
    """Seconds: of the whole step, of it the server's or the job's own, and the rest."""

    name: str
    took_s: float
    own_s: float
    beyond_s: float


def own_times(host: SystemdHost, times: int = 3) -> tuple[float, float]:
    """(stop, start) of the server by systemctl alone, until it answers a real request; medians in seconds."""
    stops, starts = [], []
    for _ in range(times):
        begun = time.monotonic()
        host.inside("systemctl", "stop", SERVICE)
        stopped = time.monotonic()
        host.inside("systemctl", "start", SERVICE)
        poll(host.serves, deadline=60, what="the server's first answer", interval=0.02)
        stops.append(stopped - begun)
        starts.append(time.monotonic() - stopped)
    return statistics.median(stops), statistics.median(starts)


def one_window(host: SystemdHost) -> dict[str, float]:
    """Seconds of each step of one window, by the keys of _STEPS."""
    with connect(host.settings()) as reached:
        begun = time.monotonic()
        window = Window(reached, WindowSettings((1, 2, 3)))
        with window:
            window.run_job(["sleep", str(JOB_S)], deadline_s=60)
        whole = time.monotonic() - begun
    record = window.record
    at = [(event.phase.value, event.seconds) for event in record.phases]
    stopped_at = dict(at)["leased"]
    reached_at = dict(at) | {"serving": at[0][1], "verified": stopped_at + record.downtime_s, "served": whole}
    steps, before = {}, 0.0
    for name in _STEPS:
        steps[name], before = reached_at[name] - before, reached_at[name]
    return steps


def measure(host: SystemdHost, windows: int) -> list[Step]:
    """The median window, step by step."""
    stop_s, start_s = own_times(host)
    own = {"stopped": stop_s, "starting": JOB_S, "verified": start_s}
    seen = [one_window(host) for _ in range(windows)]
    took = {name: statistics.median(steps[name] for steps in seen) for name in _STEPS}
    return [Step(name, s, own.get(name, 0.0), s - own.get(name, 0.0)) for name, s in took.items()]


def overhead(steps: list[Step]) -> dict[str, float]:
    """Seconds beyond the server's and the job's own: of the downtime, and of all from opening to closing."""
    return {
        "overhead_s": sum(step.beyond_s for step in steps if step.name in _DOWN),
        "whole_s": sum(step.beyond_s for step in steps),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="window_overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="taugate-overhead-") as folder, SystemdHost(Path(folder) / "h") as host:
        host.wait_serving()
        steps = measure(host, given.windows)
    print(f"{'step':<22} {'took':>6} {'own':>6} {'beyond':>7}")
    for step in steps:
        print(f"{_STEPS[step.name]:<22} {step.took_s:>6.2f} {step.own_s:>6.2f} {step.beyond_s:>7.2f}")
    total = overhead(steps)
    rows = [{key: round(value, 3) if key != "name" else value for key, value in asdict(step).items()} for step in steps]
    print(json.dumps({"windows": given.windows, "steps": rows} | {key: round(s, 2) for key, s in total.items()}))
    return 0 if total["overhead_s"] <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
