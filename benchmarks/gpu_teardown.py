"""How long a CUDA process takes to give its memory back, and what nvidia-smi says meanwhile. Needs a GPU and torch.

    python -m benchmarks.gpu_teardown [--gib 2 40]

Each process holds its memory and is ended by SIGTERM or SIGKILL (one also while its kernels run); nvidia-smi is
polled as a window polls it. Times in seconds after the signal, each the end of the first poll that saw it. The last
line is JSON: one object per row, and the worst of them beside the constants that a window uses.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from taugate.errors import HostError  # noqa: E402
from taugate.host import gpus, release  # noqa: E402
from taugate.host.local import LocalTransport  # noqa: E402
from taugate.host.record import WindowSettings  # noqa: E402

_LIMIT_S = 60.0
_HOLDER = """
import sys, torch
gib, busy = int(sys.argv[1]), sys.argv[2] == "busy"
print("imported", flush=True)
if not sys.stdin.readline():
    sys.exit()
held = [torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:0") for _ in range(gib)]
a = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
b = a @ a
torch.cuda.synchronize()
print("held", flush=True)
while busy:
    for _ in range(64):
        b = a @ a
    torch.cuda.synchronize()
sys.stdin.read()
"""


@dataclass(frozen=True)
class Row:
    """used in MiB; gone_s: reaped; unlisted_s: its compute-app entry went (None: it never had one); free_s: memory is
    where it was before. poll_s: median and longest time that one look of a window (two calls of nvidia-smi) took.
    """

    gib: int
    signal: str
    busy: bool
    before_mib: int
    held_mib: int
    listed: str
    gone_s: float
    unlisted_s: float | None
    free_s: float
    residual_mib: int
    polls: int
    poll_s: tuple[float, float]


def start(gib: int, busy: bool) -> subprocess.Popen[bytes]:
    """A process that has imported torch, or soon will have, and takes its memory at a line on stdin."""
    argv = [sys.executable, "-c", _HOLDER, str(gib), "busy" if busy else "idle"]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def measure(holder: subprocess.Popen[bytes], gib: int, signum: signal.Signals, busy: bool) -> Row:
    """Let it take its memory, end it, and watch. Raises HostError if it cannot, or if the memory stays."""
    here = LocalTransport()
    if holder.stdout.readline() != b"imported\n":
        raise HostError("the holder ended before it had imported torch: is torch installed?")
    before = gpus.query(here)
    holder.stdin.write(b"go\n")
    holder.stdin.flush()
    if holder.stdout.readline() != b"held\n":
        raise HostError(f"the holder could not take {gib} GiB: see its error above")
    held = gpus.query(here)
    entries = {app for app in held.apps if app.pid not in {old.pid for old in before.apps}}
    uuid = max(held.by_uuid(), key=lambda one: held.by_uuid()[one].used_mib - before.by_uuid()[one].used_mib)
    level, ended = before.by_uuid()[uuid].used_mib, []
    begun = time.monotonic()
    waiter = threading.Thread(target=lambda: (holder.wait(), ended.append(time.monotonic() - begun)))
    waiter.start()
    holder.send_signal(signum)
    unlisted, free, polls = None, None, []
    while free is None or (entries and unlisted is None) or not ended:
        asked = time.monotonic()
        now = gpus.query(here)
        seen = time.monotonic() - begun
        polls.append(seen + begun - asked)
        if unlisted is None and entries and not {app.pid for app in now.apps} & {app.pid for app in entries}:
            unlisted = seen
        if free is None and now.by_uuid()[uuid].used_mib <= level + release._EQUAL_MIB:
            free = seen
        if seen > _LIMIT_S:
            raise HostError(f"{gib} GiB were not free {_LIMIT_S:g} s after {signum.name}: {now.describe()}")
    waiter.join()
    after = gpus.query(here).by_uuid()[uuid].used_mib
    return Row(
        gib, signum.name, busy, level, held.by_uuid()[uuid].used_mib,
        ", ".join(f"{app.name} {app.used_mib} MiB" for app in sorted(entries, key=lambda app: app.pid)),
        round(ended[0], 3), None if unlisted is None else round(unlisted, 3), round(free, 3), after - level,
        len(polls), (round(statistics.median(polls), 3), round(max(polls), 3)),
    )  # fmt: skip


def line(row: Row) -> str:
    unlisted = "-" if row.unlisted_s is None else f"{row.unlisted_s:.2f}"
    kind = row.signal + (" busy" if row.busy else "")
    return (
        f"{row.gib:>4} {kind:<13} {row.before_mib:>7} {row.held_mib:>8} {row.gone_s:>7.2f} {unlisted:>9}"
        f" {row.free_s:>6.2f} {row.residual_mib:>9} {row.polls:>6} {row.poll_s[0]:>7.2f} {row.poll_s[1]:>7.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_teardown", description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, nargs="+", default=[2, 40])
    given = parser.parse_args()
    plan = [(gib, signum, False) for gib in given.gib for signum in (signal.SIGTERM, signal.SIGKILL)]
    plan.append((given.gib[-1], signal.SIGKILL, True))
    try:
        first = gpus.query(LocalTransport())
    except HostError as error:
        print(f"gpu_teardown: {error}", file=sys.stderr)
        return 2
    print(f"nvidia-smi: {first.describe()}", flush=True)
    head = ("GiB", "ended by", "before", "held MiB", "gone s", "unlisted", "free s", "left MiB", "polls")
    print("{:>4} {:<13} {:>7} {:>8} {:>7} {:>9} {:>6} {:>9} {:>6}  median     max".format(*head), flush=True)
    holders = [start(gib, busy) for gib, _, busy in plan]  # their imports take place side by side
    rows = []
    try:
        for holder, (gib, signum, busy) in zip(holders, plan, strict=True):
            rows.append(measure(holder, gib, signum, busy))
            print(line(rows[-1]), flush=True)
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    constants = WindowSettings(canary_input_ids=(1,))
    print(f"listed while held: {sorted({row.listed for row in rows})}")
    worst = {"free_s": max(row.free_s for row in rows), "residual_mib": max(row.residual_mib for row in rows)}
    worst |= {"free_timeout_s": constants.free_timeout_s, "escalate_after_s": constants.escalate_after_s}
    worst["floor_mib"] = release._FLOOR_MIB
    print(json.dumps({"rows": [asdict(row) for row in rows], "worst": worst}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
