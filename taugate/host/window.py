"""Borrowing the GPUs of a serving host, and giving them back whatever happens.

SERVING -> LEASED -> STOPPED -> FREE -> HELD -> STARTING -> SERVING, or BROKEN. Two things restore the server:
this client in every case it lives through, and the host's dead-man timer in the others. The timer is armed
before the stop and disarmed after the restore has been verified; between the two the server is never down
without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from taugate.errors import HostError, LeaseLost, WindowError
from taugate.host import fingerprint, job
from taugate.host.handback import Handback
from taugate.host.host import Host
from taugate.host.lease import Lease
from taugate.host.record import Journal, Phase, PhaseEvent, WindowRecord, WindowSettings
from taugate.host.release import Before, Release, drain, look_before, stop
from taugate.host.renewer import Renewer
from taugate.host.restore import Restore, take_canary
from taugate.host.transport import Completed, OnLine

__all__ = ["Phase", "PhaseEvent", "Window", "WindowRecord", "WindowSettings"]


class Window:
    """One window on `host`. A context manager: entering opens it, leaving closes it.

    on_event: called with each PhaseEvent as it happens; an exception in it is noted and does not stop the
    window.
    """

    def __init__(
        self,
        host: Host,
        settings: WindowSettings,
        on_event: Callable[[PhaseEvent], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.host = host
        self.settings = settings
        self.record = WindowRecord(settings.window_id, host.name, host.unit.name)
        self._journal = Journal(self.record, on_event, clock)
        self._clock, self._sleep = clock, sleep
        self._lease = Lease(host.transport, settings.window_id, settings.owner, host.work_dir, bool(host.settings.sudo))
        self._renewer = Renewer(self._lease, settings.ttl_s, self._taken_by)
        self._handback = Handback(
            host,
            self._journal,
            self._lease,
            self._renewer,
            Restore(host, settings, self._lease, clock, sleep),
            settings,
            clock,
        )
        self._opened = self._closed = False
        self._stopped_at: float | None = None
        self._jobs = 0

    @property
    def phase(self) -> Phase:
        """The phase reached last."""
        return self._journal.phase

    @property
    def lost(self) -> str | None:
        """None, or why the GPUs may no longer be used."""
        return self._renewer.lost

    def open(self) -> Window:
        """Take the GPUs. Whatever goes wrong after the timer was armed, the server is back before this
        raises.

        Raises HostError and WindowError (also: in use by another window), DeadlineError.
        """
        if self._opened:
            raise WindowError(f"window {self.settings.window_id} has been opened before: make a new one")
        if not self.settings.canary_input_ids:
            raise WindowError(
                "a window needs canary_input_ids: without a real request nobody knows that a server serves"
            )
        self._journal.begin()
        self._lease.require_free()
        self.record.identity_before = self.host.server.identity()
        self._canary = take_canary(self.host, self.settings)
        before = look_before(self.host)
        self._handback.fingerprint = fingerprint.take(self.host, self.record.identity_before, before.gpus)
        self.record.gpus_before_mib = {gpu.uuid: gpu.used_mib for gpu in before.gpus.gpus}
        self._journal.event(Phase.SERVING, f"{self.record.identity_before.model_id}; {before.gpus.describe()}")
        self._opened = True
        try:
            self._acquire(before)
        except BaseException as error:
            self._close_after(error)
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
        """Run one job on the freed GPUs, in the host's work_dir; systemd ends it after `deadline_s` seconds.

        A job that fails is a value. Raises LeaseLost (the host has taken its GPUs back), DeadlineError
        (systemd ended it), JobError (its end is unknown).
        """
        if self.phase is not Phase.HELD:
            raise WindowError(f"window {self.settings.window_id} holds no GPUs: it is {self.phase.value}")
        self._require_lease()
        self._jobs += 1
        done = job.run_job(
            self.host.transport,
            argv,
            window_id=self.settings.window_id,
            number=self._jobs,
            service=self.host.unit.name,
            work_dir=self.host.work_dir,
            deadline_s=deadline_s,
            env=env,
            on_line=on_line,
            sudo=bool(self.host.settings.sudo),
        )
        if done.rc != 0:
            self._require_lease()  # a job that was stopped because the window is over gets that as its reason
            if taken := self._taken_by():
                raise LeaseLost(taken)
        return job.check_end(done, f"job {self._jobs} of window {self.settings.window_id}", deadline_s)

    def close(self, interrupted: bool = False) -> None:
        """Give the GPUs back: stop the jobs, start the server, verify it, disarm the timer last.

        A KeyboardInterrupt is kept until that is done; a second one leaves the rest to the host's timer.
        interrupted: the first has already been. A second call does nothing. Raises WindowError (broken), LeaseLost
        (it serves, but the window was not ours to its end).
        """
        pending: KeyboardInterrupt | None = None
        worked = False
        while self._opened and not self._closed:
            try:
                self._handback.run(self._stopped_at, self._canary)
                self._closed = worked = True
            except KeyboardInterrupt as interrupt:
                if pending or interrupted:
                    self._fail("the restore was interrupted twice")
                    interrupt.add_note(self.record.error)
                    raise
                pending = interrupt
            except BaseException as error:
                broken = self._fail(str(error) or repr(error), quarantine=isinstance(error, HostError))
                if pending is None and isinstance(error, Exception):
                    raise broken from error
                # Whoever wants the process to end gets that, with the bad news attached.
                error = pending or error
                error.add_note(str(broken))
                raise error  # noqa: B904
        if pending:
            raise pending
        if worked and self.record.lease_lost:
            raise LeaseLost(self.record.lease_lost)

    def __enter__(self) -> Window:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(interrupted=kind is not None and issubclass(kind, KeyboardInterrupt))

    def _acquire(self, before: Before) -> None:
        self._lease.arm(self.settings.ttl_s, self.host.unit.name, self.host.server.port)
        self._require_lease()
        self._renewer.start()
        self._journal.event(
            Phase.LEASED,
            f"the host restores the server {self.settings.ttl_s:g} s after it last heard from us",
        )
        if self.settings.drain_s:
            self.record.notes.append(f"drain: {drain(self.host, self.settings, self._clock, self._sleep)}")
        self._stopped_at = self._clock()
        state = stop(self.host, before, self.settings, self._lease, self._clock, self._sleep)
        self._journal.event(Phase.STOPPED, f"{state.active}, result {state.result}, KillMode={before.state.kill_mode}")
        release = Release(
            self.host,
            before,
            self.settings,
            self._lease,
            self.record.escalations.append,
            self._clock,
            self._sleep,
        )
        self._journal.event(Phase.FREE, release.wait().describe())
        self._require_lease()
        self._journal.event(Phase.HELD, f"{self._clock() - self._stopped_at:.1f} s after the stop")

    def _fail(self, why: str, quarantine: bool = False) -> WindowError:
        self._closed = True
        return self._handback.give_up(why, quarantine)

    def _close_after(self, error: BaseException) -> None:
        """Restore after `error`.

        A restore that fails is raised in its place, unless that was Ctrl-C or an exit.
        """
        try:
            self.close(interrupted=isinstance(error, KeyboardInterrupt))
        except LeaseLost as lost:
            error.add_note(str(lost))
        except WindowError as broken:
            if isinstance(error, Exception):
                raise broken from error
            error.add_note(str(broken))

    def _require_lease(self) -> None:
        if self.lost or not self._lease.alive():
            raise LeaseLost(
                self.lost or f"window {self.settings.window_id} has lost its dead-man timer {self._lease.timer}"
            )

    def _taken_by(self) -> str | None:
        if self.phase is not Phase.HELD:
            return None
        state = self.host.unit.show()
        return None if state.stopped else f"{self.host.unit.name} was started by somebody else ({state.active})"
