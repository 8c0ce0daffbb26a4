"""Who runs the server: systemd itself, as a window needs it, or something behind or beside systemd."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from taugate.host.check import Check
from taugate.host.host import Host
from taugate.host.unit import COMMAND_DEADLINE_S, show_properties

_CONTAINER = re.compile(r"\b(docker|podman|nerdctl|kubectl|srun|sbatch)\b")
_OTHERS = {"kubepods": "Kubernetes", "slurm": "Slurm", "docker": "Docker", "libpod": "Podman"}
_LOOP_S = 60.0
_CLOCK_S = 300.0


def manager_checks(host: Host) -> Iterator[Check]:
    """Read-only. Raises HostError."""
    name = host.unit.name
    told = show_properties(host.transport, name, "ExecStart,NRestarts,ActiveEnterTimestampMonotonic,TriggeredBy")
    found = _CONTAINER.search(told.get("ExecStart", ""))
    yield Check(
        "systemd runs the server",
        not found,
        f"{name} starts it through {found[1]}" if found else f"{name} starts it itself",
        "its processes are not in the unit's control group, so a window could not tell them from others: let the"
        " unit start the server directly",
    )
    others = _others(host)
    yield Check(
        "no other manager",
        not others,
        f"GPU processes belong to {', '.join(others)}" if others else "no GPU process belongs to one",
        "what it runs comes back by itself when it is stopped: such hosts are not borrowed",
    )
    starters = told.get("TriggeredBy", "")
    yield Check(
        "nothing else starts it",
        True,
        f"{starters} may start it in mid-window, which ends the capture" if starters else "no timer, socket or path",
        warn=bool(starters),
    )
    uptime = host.transport.run(["cat", "/proc/uptime"], deadline=COMMAND_DEADLINE_S).stdout.split()
    began = int(told.get("ActiveEnterTimestampMonotonic") or 0) / 1e6
    up = float(uptime[0]) - began if uptime and began else None
    restarts = int(told.get("NRestarts") or 0)
    yield Check(
        "not restarting",
        not (restarts > 0 and up is not None and up < _LOOP_S),
        f"{restarts} restarts" + (f", up for {up:.0f} s" if up is not None else ""),
        "it may be in a restart loop: look at its journal, or wait a minute",
    )
    done = host.transport.run(["date", "+%s"], deadline=COMMAND_DEADLINE_S)
    drift = abs(int(done.stdout) - time.time()) if done.stdout.strip().isdigit() else None
    yield Check(
        "clock",
        drift is None or drift <= _CLOCK_S,
        "unknown" if drift is None else f"{drift:.0f} s from ours",
        "the times in reports and in the host's journal would not agree: set the clocks",
    )


def _others(host: Host) -> list[str]:
    pids = sorted({app.pid for app in host.gpus().apps if app.pid > 1})
    if not pids:
        return []
    argv = ["cat", *(f"/proc/{pid}/cgroup" for pid in pids)]
    text = host.transport.run(argv, deadline=COMMAND_DEADLINE_S).stdout
    return sorted({name for part, name in _OTHERS.items() if part in text})
