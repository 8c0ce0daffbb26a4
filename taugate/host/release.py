"""Getting the server's GPU memory back: what was there before the stop, waiting until it is gone, and
careful force.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from taugate.errors import DeadlineError, HostError, WindowError
from taugate.host.gpus import GpuSnapshot
from taugate.host.host import Host
from taugate.host.lease import Lease
from taugate.host.record import WindowSettings
from taugate.host.unit import COMMAND_DEADLINE_S, UnitState
from taugate.polling import poll

# Measured on an H200 (benchmarks/gpu_teardown.py): 2 or 40 GiB were gone 0.3 s after SIGTERM or SIGKILL, idle or in
# a kernel, the process's entry after 0.4 s, and 0 MiB stayed; one look takes 0.08 to 0.23 s. What waits longer than
# escalate_after_s is therefore no teardown. The floor leaves room for desktops and persistence.
_FLOOR_MIB = 1024
_FLOOR_SHARE = 0.03
_EQUAL_MIB = 16  # two readings that agree this well are equal: desktops and daemons move a little
_STAT = re.compile(r"^(\d+) \(.*\) (.*)$", re.MULTILINE)
_POLL_S = 0.5
_FIRST_PAUSE_S = 0.1
_STOP_MARGIN_S = 30.0
_STOP_UNLIMITED_S = 600.0


@dataclass(frozen=True)
class Before:
    """The host while it still served.

    start_times: pid -> start time in clock ticks since boot, for GPU processes.
    """

    state: UnitState
    pids: frozenset[int]
    start_times: dict[int, int]
    gpus: GpuSnapshot

    def limits_mib(self) -> dict[str, int]:
        """uuid -> used MiB at which a borrowed GPU counts as free: its level without the server, or a small
        floor.

        Borrowed are the GPUs on which the unit has processes; all, if the driver shows none of them
        (containers).
        """
        apps = self.gpus.apps_of(self.pids)
        borrowed = {app.gpu_uuid for app in apps} or set(self.gpus.by_uuid())
        limits = {}
        for gpu in self.gpus.gpus:
            if gpu.uuid in borrowed:
                sizes = [app.used_mib for app in apps if app.gpu_uuid == gpu.uuid]
                # A size that is not told makes the level unknown; then only the floor counts.
                level = 0 if None in sizes or not sizes else gpu.used_mib - sum(size or 0 for size in sizes)
                limits[gpu.uuid] = max(_FLOOR_MIB, int(_FLOOR_SHARE * gpu.total_mib), level)
        return limits


def look_before(host: Host) -> Before:
    """Take the snapshot. Raises HostError, and WindowError if the unit is not active."""
    state = host.unit.show()
    if state.active != "active":
        raise WindowError(f"{host.unit.name} on {host.name} is {state.active}, not active: there is nothing to borrow")
    pids = host.unit.pids(state.control_group)
    gpus = host.gpus()
    return Before(state, pids, start_times(host, {app.pid for app in gpus.apps_of(pids)}), gpus)


def start_times(host: Host, pids: set[int]) -> dict[int, int]:
    """pid -> field 22 of /proc/PID/stat; pids that are gone are left out.

    With the pid it names one process for good.
    """
    if not pids:
        return {}
    argv = ["cat", *(f"/proc/{pid}/stat" for pid in sorted(pids))]
    text = host.transport.run(argv, deadline=COMMAND_DEADLINE_S).stdout
    return {int(pid): int(rest.split()[19]) for pid, rest in _STAT.findall(text)}


def drain(
    host: Host,
    settings: WindowSettings,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait at most `drain_s` until the server has no requests; returns what became of it.

    Raises WindowError if it still has some and on_busy is "give up", HostError.
    """
    last = host.server.loads()
    end = clock() + settings.drain_s
    while last and last.running + last.waiting and clock() < end:
        sleep(settings.poll_s)
        last = host.server.loads()
    if last is None:
        return "the server does not tell its load"
    busy = last.running + last.waiting
    if busy and settings.on_busy == "give up":
        raise WindowError(
            f"{host.unit.name} on {host.name} still had {busy} requests after {settings.drain_s:g} s, and was not"
            " stopped: try again when it is quieter, or let the window stop it all the same"
        )
    return f"{busy} requests are left to the stop" if busy else "idle"


def stop(
    host: Host,
    before: Before,
    settings: WindowSettings,
    lease: Lease,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> UnitState:
    """Stop the unit if `lease` is held, and wait until systemd calls it inactive or failed.

    Raises LeaseLost, DeadlineError, HostError.
    """
    lease.stop(host.unit.name)
    limit = settings.stop_timeout_s
    if limit is None:
        own = before.state.timeout_stop_s
        limit = own + _STOP_MARGIN_S if math.isfinite(own) else _STOP_UNLIMITED_S
    return poll(
        lambda: state if (state := host.unit.show()).stopped else None,
        deadline=limit,
        what=f"the stop of {host.unit.name} on {host.name}",
        interval=settings.poll_s,
        first=_FIRST_PAUSE_S,
        clock=clock,
        sleep=sleep,
    )


class Release:
    """Waits until the borrowed GPUs are free. on_escalation gets one sentence for each use of force."""

    def __init__(
        self,
        host: Host,
        before: Before,
        settings: WindowSettings,
        lease: Lease,
        on_escalation: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._host, self._before, self._settings, self._lease = host, before, settings, lease
        self._on_escalation, self._clock, self._sleep = on_escalation, clock, sleep
        self._limits = before.limits_mib()
        self._last: GpuSnapshot | None = None
        self._free_before: GpuSnapshot | None = None
        self._steps = [self._kill_group, self._kill_single]

    def wait(self) -> GpuSnapshot:
        """Poll until free: the unit's processes are gone from the GPUs, memory is at its limit, twice in a
        row.

        Raises WindowError naming what still holds memory, or that somebody started the unit; HostError.
        """
        self._begun = self._clock()
        try:
            return poll(
                self._probe,
                deadline=self._settings.free_timeout_s,
                what="freeing the GPUs",
                interval=_POLL_S,
                clock=self._clock,
                sleep=self._sleep,
            )
        except DeadlineError as error:
            held = self._last.describe() if self._last else "unknown"
            raise WindowError(
                f"the GPUs of {self._host.name} were not free {self._settings.free_timeout_s:g} s after"
                f" {self._host.unit.name} had stopped ({held}): look for what holds them with `nvidia-smi`"
                " and `fuser -v`"
            ) from error

    def _probe(self) -> GpuSnapshot | None:
        self._require_stopped()
        snapshot = self._last = self._host.gpus()
        gpus = snapshot.by_uuid()
        if missing := self._limits.keys() - gpus.keys():
            raise HostError(f"nvidia-smi on {self._host.name} no longer lists {', '.join(sorted(missing))}")
        over = [uuid for uuid, limit in self._limits.items() if gpus[uuid].used_mib > limit]
        if not over and not snapshot.apps_of(self._before.pids | self._group_pids()):
            previous, self._free_before = self._free_before, snapshot
            return snapshot if previous and self._agree(previous, snapshot) else None
        self._free_before = None
        waited = self._clock() - self._begun
        done = 2 - len(self._steps)
        if self._steps and waited >= self._settings.escalate_after_s * (done + 1):
            self._steps.pop(0)(snapshot)
        return None

    def _agree(self, one: GpuSnapshot, two: GpuSnapshot) -> bool:
        first, second = one.by_uuid(), two.by_uuid()
        return all(abs(first[uuid].used_mib - second[uuid].used_mib) <= _EQUAL_MIB for uuid in self._limits)

    def _kill_group(self, snapshot: GpuSnapshot) -> None:
        pids = self._group_pids()
        done = self._lease.kill_leftovers(self._host.unit.name)
        self._on_escalation(
            f"SIGKILL to what was left in the control group of {self._host.unit.name}"
            f" (pids {', '.join(map(str, sorted(pids))) or 'none'}; exit status {done.rc})"
        )

    def _kill_single(self, snapshot: GpuSnapshot) -> None:
        """Kill one by one the processes for which control group, snapshot, start time and GPU list all
        agree.
        """
        candidates = {app.pid for app in snapshot.apps if app.gpu_uuid in self._limits}
        candidates &= self._before.pids & self._before.start_times.keys() & self._group_pids()
        times = start_times(self._host, candidates)
        for pid in sorted(candidates):
            started = self._before.start_times[pid]
            if pid > 1 and times.get(pid) == started:
                done = self._lease.kill(self._host.unit.name, pid, started)
                self._on_escalation(f"SIGKILL to pid {pid} of {self._host.unit.name} (exit status {done.rc})")

    def _group_pids(self) -> frozenset[int]:
        return self._host.unit.pids(self._before.state.control_group)

    def _require_stopped(self) -> None:
        # Restart=always or an operator: what is killed or waited for now would belong to a server at work.
        if not (state := self._host.unit.show()).stopped:
            raise WindowError(
                f"{self._host.unit.name} on {self._host.name} became {state.active} inside the window:"
                " somebody started it"
            )
