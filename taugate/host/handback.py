"""Giving the GPUs back: the server first, then the proof that it serves, the dead-man timer last."""

from __future__ import annotations

import time
from collections.abc import Callable

from taugate.errors import HostError, LeaseLost, WindowError
from taugate.host import fingerprint
from taugate.host.gpus import GpuSnapshot
from taugate.host.host import Host
from taugate.host.lease import Lease
from taugate.host.notify import notify
from taugate.host.record import Journal, Phase, WindowRecord, WindowSettings, compare_canary
from taugate.host.renewer import Renewer
from taugate.host.restore import Restore
from taugate.host.sglang import Generation

_TRIES = 3
_SAME_MEMORY = 0.05


def compare_memory(gpus: GpuSnapshot, record: WindowRecord) -> None:
    """Note GPUs on which there is not as much memory used as before."""
    record.gpus_after_mib = now = {gpu.uuid: gpu.used_mib for gpu in gpus.gpus}
    for uuid, before in record.gpus_before_mib.items():
        if abs(now.get(uuid, 0) - before) > _SAME_MEMORY * before:
            record.notes.append(f"{uuid} held {before} MiB before and holds {now.get(uuid, 0)} MiB now")


class Handback:
    """The end of a window. It writes what happens into the journal's record."""

    def __init__(
        self,
        host: Host,
        journal: Journal,
        lease: Lease,
        renewer: Renewer,
        restore: Restore,
        settings: WindowSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._journal, self._record = host, journal, journal.record
        self._lease, self._renewer, self._restore, self._clock = lease, renewer, restore, clock
        self._settings = settings
        self._disarms = 0
        self._stopped_at: float | None = None
        self.fingerprint: dict[str, str] = {}  # as it was before the stop

    def run(self, stopped_at: float | None, canary: Generation) -> None:
        """All steps in order. After an interrupt, call it again: it begins with the first and does no harm.

        stopped_at: clock reading at the stop command, None if none was given. canary: what the server
        answered then. Raises WindowError; that the lease was lost is only written down.
        """
        self._stopped_at, self._canary = stopped_at, canary
        restore, record = self._restore, self._record
        holder = restore.persist(self._lease.holder, "reading the dead-man timer")
        mine = holder is not None and self._lease.is_mine(holder)
        if self._disarms and not mine:  # interrupted after the last step
            self._finish("the same server answers")
            return
        if holder and not mine:
            # Ours has fired long ago and the next borrower is at work: starting the server now would break
            # their window.
            self._renewer.stop()
            record.lease_lost = self._renewer.lost or f"the host is in use by `{holder}`"
            self._finish("left to the host" if self._stopped_at else "not touched")
            return
        for _ in range(_TRIES):
            if self._stopped_at is not None and not self._bring_back(self._stopped_at):
                continue
            self._renewer.stop()
            record.lease_lost = record.lease_lost or self._renewer.lost or ""
            if not holder:
                if self._stopped_at is not None:
                    lost = f"the dead-man timer {self._lease.timer} ran out inside the window"
                    record.lease_lost = record.lease_lost or lost
                break
            if restore.persist(self._disarm, "disarming the dead-man timer"):
                break
        else:
            raise WindowError(f"{self._host.unit.name} stopped again and again after it had answered")
        self._finish("the same server answers" if self._stopped_at is not None else "the server was not stopped")

    def _bring_back(self, stopped_at: float) -> bool:
        """False if the server stopped again before it had answered."""
        self._journal.event(Phase.STARTING, "")
        begun = self._clock()
        self._restore.stop_jobs()
        assert self._record.identity_before
        self._record.identity_after = self._restore.start(self._record.identity_before)
        answers = self._restore.verify()
        if answers is None:
            return False
        self._record.downtime_s = self._clock() - stopped_at
        self._record.start_s = self._clock() - begun
        self._record.canary = compare_canary(self._canary, answers[0])
        self._compare()
        return True

    def _compare(self) -> None:
        """Write down what is not as before, in memory or in any field; by itself that breaks nothing."""
        try:
            gpus = self._host.gpus()
            after = fingerprint.take(self._host, self._record.identity_after, gpus)
        except HostError as error:
            self._record.notes.append(f"what else is different after the restore is unknown: {error}")
            return
        compare_memory(gpus, self._record)
        if self.fingerprint:
            differ = fingerprint.differences(self.fingerprint, after)
            self._record.fingerprint = {"fields": len(after), "differ": differ}

    def _disarm(self) -> bool:
        """False if the server has stopped again: a stop that was still under way came last."""
        self._disarms += 1
        try:
            done = self._lease.disarm(None if self._stopped_at is None else self._host.unit.name)
            if not done:
                self._disarms = 0
            return done
        except LeaseLost as error:
            if self._disarms == 1:  # later it only means that an earlier try got through
                self._record.lease_lost = self._record.lease_lost or str(error)
            return True

    def _finish(self, detail: str) -> None:
        self._record.outcome = "restored"
        self._journal.event(Phase.SERVING, detail)

    def give_up(self, why: str, quarantine: bool) -> WindowError:
        """Leave the rest to the host's timer; the error says so.

        quarantine: the host is to refuse windows until a person has looked.
        """
        self._renewer.stop(timeout=0)  # from here on the timer must be allowed to fire
        self._record.outcome = "broken"
        self._record.error = self._restore.broken(why, self._lease.timer, self._renewer.lost)
        self._journal.event(Phase.BROKEN, self._record.error)
        if quarantine:
            try:
                self._lease.quarantine(why)
            except HostError as error:  # whatever keeps us from the host: the error to report is the first one
                self._record.notes.append(f"the host could not be quarantined: {error}")
            self._tell_somebody()
        return WindowError(self._record.error)

    def _tell_somebody(self) -> None:
        record = self._record
        facts = {"event": "restore failed", "host": record.host, "service": record.service, "window": record.window_id}
        record.notes += notify(record.error, facts, self._settings.notify, self._settings.webhook)
