"""Borrowing only what a running server leaves free: it is never stopped, and it comes first.

The window takes the host's lease, so that nobody stops the server or captures at the same time, checks that the
measured free memory of one GPU covers the ceiling, and runs its job without any tie to the service: whoever wants to
stop or restart that may. On the host itself, next to the job, a watch ends it when the server is not active or not
healthy, or when the GPU holds more than the ceiling beyond what it held before. That the client is gone ends it, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from taugate.errors import HostError, LeaseLost, WindowError
from taugate.host import job
from taugate.host.check import Check
from taugate.host.gpus import Gpu
from taugate.host.handback import compare_memory
from taugate.host.helper import NOT_SO, OVER_CEILING, UNHEALTHY
from taugate.host.host import Host
from taugate.host.lease import Lease
from taugate.host.notify import notify
from taugate.host.record import Journal, Phase, PhaseEvent, WindowRecord, WindowSettings, compare_canary
from taugate.host.renewer import Renewer
from taugate.host.restore import take_canary
from taugate.host.transport import Completed, OnLine, last_line
from taugate.host.unit import UnitState


@dataclass(frozen=True)
class Ceiling:
    """What a job beside a server may take. mib: MiB of one GPU, the CUDA context (some 500 MiB) included.

    mib None: what is free, less `spare_mib`, which is left to the server in any case. patience_s: how long the server
    may take for /health, twice in a row.
    """

    mib: int | None = None
    spare_mib: int = 2048
    patience_s: float = 20.0


class BesideWindow:
    """A window in which the server goes on serving. A context manager like `Window`; the job sees one GPU only."""

    def __init__(
        self,
        host: Host,
        settings: WindowSettings,
        ceiling: Ceiling,
        on_event: Callable[[PhaseEvent], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host, self.settings, self.ceiling = host, settings, ceiling
        self.record = WindowRecord(settings.window_id, host.name, host.unit.name)
        self._journal = Journal(self.record, on_event, clock)
        self._lease = Lease(
            host.transport, settings.window_id, settings.owner, host.work_dir, bool(host.settings.sudo)
        )
        self._renewer = Renewer(self._lease, settings.ttl_s)
        self._jobs = 0
        self._opened = False
        self.gpu: Gpu | None = None
        self.mib = 0

    def open(self) -> BesideWindow:
        """Take the lease. Raises WindowError (in use, not enough memory, server not well), HostError."""
        if self._opened:
            raise WindowError(f"window {self.settings.window_id} has been opened before: make a new one")
        self._journal.begin()
        self._lease.require_free()
        self._unit = self.host.unit.show()
        self.record.identity_before = self.host.server.identity()
        self._canary = take_canary(self.host, self.settings)
        snapshot = self.host.gpus()
        self.gpu, self.mib = choose(snapshot.gpus, self.ceiling, self.host.name)
        self.record.gpus_before_mib = {gpu.uuid: gpu.used_mib for gpu in snapshot.gpus}
        self._journal.event(Phase.SERVING, f"{self.record.identity_before.model_id}; {snapshot.describe()}")
        self._lease.arm(self.settings.ttl_s, self.host.unit.name, self.host.server.port, beside=True)
        self._opened = True
        try:
            self._renewer.start()
            self._journal.event(Phase.LEASED, "the server stays; without us the host ends the job, and nothing else")
            held = f"at most {self.mib} MiB of GPU {self.gpu.index}, of {free_mib(self.gpu)} MiB free"
            self._journal.event(Phase.HELD, held)
        except BaseException:
            self.close()
            raise
        return self

    def run_job(
        self,
        argv: Sequence[str],
        *,
        deadline_s: float,
        env: Mapping[str, str] | None = None,
        on_line: OnLine | None = None,
    ) -> Completed:
        """Run one job beside the server, in work_dir. It sees the chosen GPU only.

        Raises WindowError when it was ended because the server was in danger, LeaseLost, DeadlineError, JobError.
        """
        if self._journal.phase is not Phase.HELD or self.gpu is None:
            raise WindowError(f"window {self.settings.window_id} holds no GPU: it is {self._journal.phase.value}")
        self._jobs += 1
        what = f"job {self._jobs} of window {self.settings.window_id}"
        service, port = self.host.unit.name, self.host.server.port
        done = job.run_job(
            self.host.transport,
            argv,
            window_id=self.settings.window_id,
            number=self._jobs,
            service=service,
            work_dir=self.host.work_dir,
            deadline_s=deadline_s,
            env={"CUDA_VISIBLE_DEVICES": self.gpu.uuid, **(env or {})},
            on_line=on_line,
            sudo=bool(self.host.settings.sudo),
            guard=job.Guard(port, self.gpu.uuid, self.mib, self.ceiling.patience_s),
        )
        said = last_line(done.stderr).removeprefix("taugate: ")
        if done.rc != 0 and (self._renewer.lost or not self._lease.alive()):
            raise LeaseLost(self._renewer.lost or str(self._lease.lost()))
        if done.rc in (UNHEALTHY, NOT_SO):
            raise WindowError(f"{what} was ended for the server's sake: {said}")
        if done.rc == OVER_CEILING:
            raise WindowError(
                f"{what} was ended, because memory went over the ceiling of {self.mib} MiB ({said}): raise"
                " capture.max_gpu_memory if there is room, or capture without `beside`"
            )
        return job.check_end(done, what, deadline_s)

    def close(self) -> None:
        """End what still runs, give the lease back, and see that the server is as it was.

        Raises WindowError when it is not healthy although nobody stopped it, LeaseLost, HostError.
        """
        if not self._opened or self.record.outcome:
            return
        try:
            self._lease.end_jobs()
        finally:
            self._renewer.stop()
        state = self.host.unit.show()
        others = self._done_by_others(state)
        trouble = "" if others else self._trouble(state)
        self.record.notes += [others] if others else []
        try:
            self._lease.disarm()
        except LeaseLost as lost:
            self.record.lease_lost = self._renewer.lost or str(lost)
        if trouble:
            raise self._broken(trouble)
        self.record.outcome = "beside"
        self._journal.event(Phase.SERVING, others or "the server served all the time")
        if self.record.lease_lost:
            raise LeaseLost(self.record.lease_lost)

    def __enter__(self) -> BesideWindow:
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _done_by_others(self, state: UnitState) -> str:
        """What somebody else did to the service in the meantime, which is their right; "" if nothing."""
        name = self.host.unit.name
        if state.active in ("inactive", "deactivating"):
            return f"{name} was stopped by somebody else meanwhile"
        new = state.invocation_id != self._unit.invocation_id
        by_systemd = state.active == "failed" or state.n_restarts > self._unit.n_restarts
        return f"{name} was restarted by somebody else meanwhile" if new and not by_systemd else ""

    def _trouble(self, state: UnitState) -> str:
        """What is wrong with the server now; "" if it answers as before."""
        before = self.record.identity_before
        assert before
        if state.active == "failed" or state.n_restarts > self._unit.n_restarts:
            return f"it ended by itself meanwhile (it is {state.active}, {state.n_restarts} restarts)"
        try:
            if not self.host.server.ready():
                return "it is not ready"
            self.record.identity_after = self.host.server.identity()
            if differences := self.record.identity_after.differs_from(before):
                return f"another server answers: {'; '.join(differences)}"
            self.record.canary = compare_canary(self._canary, take_canary(self.host, self.settings))
            compare_memory(self.host.gpus(), self.record)
        except HostError as error:
            return str(error)
        return ""

    def _broken(self, trouble: str) -> WindowError:
        unit, host = self.host.unit.name, self.host
        by_hand = host.by_hand(f"systemctl restart {unit}")
        self.record.outcome = "broken"
        self.record.error = (
            f"{unit} on {host.name} is not well after a capture beside it: {trouble}; by hand: `{by_hand}`"
        )
        self._journal.event(Phase.BROKEN, self.record.error)
        facts = {"event": "server not well", "host": host.name, "service": unit, "window": self.record.window_id}
        self.record.notes += notify(self.record.error, facts, self.settings.notify, self.settings.webhook)
        return WindowError(self.record.error)


def free_mib(gpu: Gpu) -> int:
    return gpu.total_mib - gpu.used_mib


def choose(gpus: Sequence[Gpu], ceiling: Ceiling, host: str) -> tuple[Gpu, int]:
    """The GPU with the most free memory, and the ceiling there in MiB. Raises WindowError if that is not there."""
    gpu = max(gpus, key=free_mib)
    mib = free_mib(gpu) - ceiling.spare_mib if ceiling.mib is None else ceiling.mib
    if mib <= 0 or mib + ceiling.spare_mib > free_mib(gpu):
        needed = f"{ceiling.mib} MiB and " if ceiling.mib else "anything and "
        raise WindowError(
            f"GPU {gpu.index} of {host} has {free_mib(gpu)} MiB free beside the server, too little for {needed}"
            f"{ceiling.spare_mib} MiB to spare: lower capture.max_gpu_memory, start the server with a smaller"
            " --mem-fraction-static, or capture without `beside`"
        )
    return gpu, mib


def room(host: Host, ceiling: Ceiling) -> Check:
    """Preflight's question: is there room beside the server. Raises HostError."""
    try:
        gpu, mib = choose(host.gpus().gpus, ceiling, host.name)
    except WindowError as error:
        return Check("room beside the server", False, str(error))
    return Check("room beside the server", True, f"{mib} MiB of GPU {gpu.index}, which has {free_mib(gpu)} MiB free")


def plan(host: Host, settings: WindowSettings, ceiling: Ceiling, job_s: float) -> list[str]:
    """The commands of a window beside the server. Raises HostError, WindowError."""
    gpu, mib = choose(host.gpus().gpus, ceiling, host.name)
    return [
        f"arm      systemd-run --unit=taugate-window --on-active={settings.ttl_s:.0f}s … end the job",
        f"job      systemd-run --unit=taugate-job-{settings.window_id}-1 --property=RuntimeMaxSec={job_s:.0f} …"
        f"   (GPU {gpu.index}, at most {mib} MiB)",
        f"         ended when {host.unit.name} is not active, not healthy, or GPU {gpu.index} holds more than that",
        f"disarm   systemctl stop taugate-window.timer; {host.unit.name} is never stopped",
    ]
