"""Everything that can fail without a GPU, asked before the server is touched.

Nothing here changes anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from taugate.errors import HostError, PreflightError
from taugate.host.check import Check
from taugate.host.gpus import GpuSnapshot
from taugate.host.host import Host
from taugate.host.install import rights
from taugate.host.managers import manager_checks
from taugate.host.record import WindowSettings
from taugate.host.serving import serving_checks
from taugate.host.status import lease_state
from taugate.host.transport import last_line
from taugate.host.unit import COMMAND_DEADLINE_S, UnitState, show_properties

MIN_SYSTEMD = 249
# Units that systemd brings back after a reboot in mid-window, or that cannot be enabled because something
# pulls them in.
_PERSISTENT = (
    "enabled",
    "enabled-runtime",
    "static",
    "linked",
    "linked-runtime",
    "alias",
    "generated",
    "indirect",
)


@dataclass(frozen=True)
class Downtime:
    """How long the server is expected to be away, in seconds. start_source: where start_s comes from."""

    stop_s: float
    job_s: float
    start_s: float
    start_source: str

    @property
    def total_s(self) -> float:
        return self.stop_s + self.job_s + self.start_s


def expect_downtime(host: Host, *, stop_s: float, job_s: float, last_start_s: float | None = None) -> Downtime:
    """Add up an estimate. last_start_s: seconds measured by an earlier window (WindowRecord.start_s).

    Raises HostError.
    """
    return Downtime(stop_s, job_s, *host.start_estimate(last_start_s))


def preflight(
    host: Host,
    *,
    downtime: Downtime,
    budget_s: float,
    disk_mib: int = 1024,
    extra: Sequence[Callable[[], Check]] = (),
    window: WindowSettings | None = None,
) -> list[Check]:
    """Ask everything and return all answers, red ones included.

    budget_s: seconds the server may be away. disk_mib: MiB needed in work_dir. extra: the caller's own checks
    (remote Python, checkpoint, compiled kernels); one that raises HostError is red. window: what is asked of the window
    (the times that it will wait). Raises HostError if the
    host is unreachable.
    """
    host.transport.run(["true"], deadline=30.0).check("a first command")
    settings = window or WindowSettings(())
    began = _starts(host)
    groups: list[Callable[[], Iterator[Check]]] = [
        lambda: _systemd(host),
        lambda: _unit(host.unit.name, host.unit.show(), settings),
        lambda: manager_checks(host),
        lambda: serving_checks(host, settings),
        lambda: _gpus(host, host.gpus()),
        lambda: _leftovers(host),
        lambda: _work_dir(host, disk_mib),
        lambda: _budget(downtime, budget_s),
    ]
    checks: list[Check] = []
    for group in groups:
        checks += _asked(group)
    for one in extra:
        checks += _asked(lambda one=one: iter([one()]))
    checks += _asked(lambda: _steady(host, began))
    return checks


def require(checks: Sequence[Check]) -> None:
    """Raise PreflightError with one sentence for every red check; do nothing if all are green."""
    if red := [str(check) for check in checks if not check.ok]:
        raise PreflightError("the server was not touched, because " + "; ".join(red))


def _asked(group: Callable[[], Iterator[Check]]) -> list[Check]:
    checks: list[Check] = []
    try:
        for check in group():
            checks.append(check)
    except HostError as error:
        checks.append(Check("host", False, str(error), "a check could not be made"))
    return checks


def _starts(host: Host) -> dict[str, str]:
    try:
        return show_properties(host.transport, host.unit.name, "NRestarts,InvocationID")
    except HostError:
        return {}  # other questions are red then


def _steady(host: Host, began: dict[str, str]) -> Iterator[Check]:
    same = _starts(host) == began
    detail = "the same start as at the first question" if same else "it was started anew between two questions"
    yield Check("steady", same, detail, "it may be in a restart loop, or somebody works on it: look at its journal")


def _systemd(host: Host) -> Iterator[Check]:
    done = host.transport.run(["systemctl", "--version"], deadline=COMMAND_DEADLINE_S)
    found = re.match(r"systemd (\d+)", done.stdout)
    version = int(found[1]) if found else 0
    detail = done.stdout.partition("\n")[0] or last_line(done.stderr) or "no answer"
    remedy = f"systemd {MIN_SYSTEMD} or newer is needed: containers, Kubernetes pods and Slurm jobs are not borrowed"
    yield Check("systemd", version >= MIN_SYSTEMD, detail, remedy)


def _unit(name: str, state: UnitState, window: WindowSettings) -> Iterator[Check]:
    yield Check("unit loaded", state.load == "loaded", f"{name} is {state.load}", "set `service` to the serving unit")
    if state.load != "loaded":
        return
    yield Check("unit active", state.active == "active", f"{name} is {state.active} ({state.sub})", "start it first")
    yield Check(
        "unit enabled",
        state.unit_file_state in _PERSISTENT,
        f"{name} is {state.unit_file_state or 'of unknown origin'}",
        f"`systemctl enable {name}`, or a reboot inside the window leaves the server down",
    )
    cut = " (running requests are cut off: SGLang finishes them with mixed only)"
    yield Check(
        "stop ends the server",
        state.kill_mode != "none",
        f"KillMode={state.kill_mode}{cut if state.kill_mode == 'control-group' else ''},"
        f" TimeoutStopSec={state.timeout_stop_s:g} s, Restart={state.restart}",
        "with KillMode=none a stop leaves every process running: set KillMode=mixed",
    )
    limit, own = window.stop_timeout_s, state.timeout_stop_s
    endless = math.isinf(own)
    yield Check(
        "stop ends in time",
        limit is None or endless or own <= limit,
        f"systemd ends it {'never' if endless else f'after {own:g} s'} (TimeoutStopSec), a window waits"
        f" {f'{limit:g} s' if limit is not None else 'longer'} (stop_timeout)",
        f"the window would give up before systemd does: set window.stop_timeout to more than {own:g} s",
        warn=endless,
    )


def _gpus(host: Host, snapshot: GpuSnapshot) -> Iterator[Check]:
    split = [f"GPU {gpu.index}" for gpu in snapshot.gpus if gpu.mig == "Enabled"]
    detail = f"MIG is enabled on {', '.join(split)}" if split else f"{len(snapshot.gpus)} GPUs without MIG"
    yield Check("no MIG", not split, detail, "a window can only borrow whole GPUs")
    own = host.unit.pids()
    foreign = [f"{app.name} (pid {app.pid})" for app in snapshot.apps if app.pid not in own]
    yield Check(
        "GPUs are the server's alone",
        not foreign,
        f"also there: {', '.join(foreign)}" if foreign else f"{len(snapshot.apps)} processes, all of {host.unit.name}",
        "these processes are not the unit's and would be in the way: stop them",
    )


def _leftovers(host: Host) -> Iterator[Check]:
    yield (allowed := rights(host))
    if not allowed.ok:
        return
    found = lease_state(host)
    holder = found.holder
    yield Check("no other window", not holder, f"`{holder}` is open" if holder else "none is open", "wait for its end")
    yield Check(
        "not quarantined",
        not found.quarantine,
        found.quarantine or "the last window gave the server back",
        "look at the server, then `python -m taugate host restore`",
    )
    left = ", ".join(found.jobs)
    yield Check("no job left over", True, f"{left}: stopped as the window opens" if left else "none", warn=bool(left))


def _work_dir(host: Host, disk_mib: int) -> Iterator[Check]:
    path, transport = host.work_dir, host.transport
    usable = all(transport.run(["test", flag, path], deadline=COMMAND_DEADLINE_S).rc == 0 for flag in ("-d", "-w"))
    detail = f"{path} {'is' if usable else 'is not'} a writable directory"
    yield Check("work_dir", usable, detail, f"`mkdir -p {path}` on the host, or set `work_dir`")
    if not usable:
        return
    done = transport.run(["df", "-Pk", path], deadline=COMMAND_DEADLINE_S).check(f"asking the free space of {path}")
    try:
        free = int(done.stdout.splitlines()[1].split()[3]) // 1024
    except (IndexError, ValueError):
        raise HostError(f"df on {host.name} gave an unexpected answer: {done.stdout!r}") from None
    yield Check("disk space", free >= disk_mib, f"{free} MiB free in {path}, {disk_mib} MiB needed", "make room")


def _budget(downtime: Downtime, budget_s: float) -> Iterator[Check]:
    yield Check(
        "downtime",
        downtime.total_s <= budget_s,
        f"expected {downtime.total_s:.0f} s = stop {downtime.stop_s:.0f} + job {downtime.job_s:.0f} + start"
        f" {downtime.start_s:.0f} ({downtime.start_source}), budget {budget_s:.0f} s",
        "raise `downtime_budget`, or measure fewer prompts",
    )
