"""The window around a capture: checks and plan before it, its results fetched after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from taugate.drafter.replay import CachedSequence
from taugate.errors import HostError, WindowError
from taugate.host import beside
from taugate.host.beside import BesideWindow, Ceiling
from taugate.host.preflight import Check, Downtime, expect_downtime, preflight, require
from taugate.host.queue import wait_until_free
from taugate.host.record import WindowSettings
from taugate.host.status import plan as commands
from taugate.host.window import PhaseEvent, Window
from taugate.pipeline.bar import CaptureBar
from taugate.pipeline.dataset import Dataset
from taugate.pipeline.results import HostResults
from taugate.pipeline.speeds import Speeds
from taugate.pipeline.survey import Record, Survey
from taugate.pipeline.warm import warm_up

_OWN_SHARE = 0.95


class Borrower:
    """Fills a data set's gaps from the surveyed host. `record` gets evidence records."""

    def __init__(self, survey: Survey, data: Dataset, record: Record) -> None:
        self.survey, self.data, self.record = survey, data, record
        self.host, self.config, self.say = survey.host, survey.config, survey.say
        self.results = HostResults(survey, data)

    def plan(self, wanted: Sequence[CachedSequence]) -> None:
        """Record what a run would do. Raises PreflightError if a check is red: such a run would end there."""
        checks = self._checks(wanted, self.survey.unasked)
        steps = [f"{check.word:5}{check}" for check in checks]
        unasked = len(self.survey.unasked)
        if unasked:
            steps.append(f"ask {self.survey.identity.model_id} for {unasked} completions, one by one")
        if wanted or unasked:
            steps.append(f"capture {len(wanted) + unasked} sequences, taps {self.survey.taps}, as the window's job:")
            how = self.host, self._settings((1,))
            job_s, ceiling = self.config.window.job_timeout, self._ceiling()
            steps += beside.plan(*how, ceiling, job_s) if ceiling else commands(*how, job_s)
        else:
            steps.append(f"no window: all {len(self.data.sequences)} states are in {self.data.store.root}")
        self.record({"type": "plan", "steps": steps})
        require(checks)

    def not_needed(self) -> None:
        """Record that nothing had to be stopped. Raises HostError if the server is not healthy all the same."""
        if not self.host.server.healthy():
            raise HostError(f"{self.host.server.where} is not healthy, although nothing was done to it")
        reason = f"all {len(self.data.sequences)} states are cached; {self.survey.identity.model_id} is healthy"
        self.say(f"window not needed: {reason}")
        self.record({"type": "window", "outcome": "not needed", "reason": reason, "phases": []})

    def capture(self, wanted: Sequence[CachedSequence]) -> None:
        """Capture these sequences in one window and put their states into the store.

        With `capture.beside` the server goes on serving and the job takes what memory it leaves free.
        Raises PreflightError with the server untouched, WindowError, JobError. An interrupted capture leaves its
        complete files on the host, and the next one goes on from them; a complete one is kept whatever becomes of the
        server.
        """
        self.wait()
        require(self._checks(wanted, ()))
        window, spec = self._window(wanted)
        warm_up(self.survey.package, spec, self.data.identity.kernel_path, self.say)
        done: dict[str, Any] | None = None
        try:
            with window:
                done = self.survey.package.job(
                    window, "target.capture", "--spec", spec, "--out", self.results.directory,
                    deadline_s=self.config.window.job_timeout, on_event=CaptureBar(self.say),
                )  # fmt: skip
        except WindowError as broken:
            if done is not None:
                broken.add_note(self._kept(wanted, done, window.record.window_id))
            raise
        finally:
            # Whatever happened inside, what became of the server is evidence.
            if window.record.phases:
                self.record({"type": "window", **window.record.to_json()})
        if window.record.outcome not in ("restored", "beside"):
            raise WindowError(f"window {window.record.window_id} ended {window.record.outcome or 'without a result'}")
        self._speeds().remember(done)
        self.results.forget_spec(spec)
        self.results.fetch(wanted, done["files"], window.record.window_id)

    def _window(self, wanted: Sequence[CachedSequence]) -> tuple[Window | BesideWindow, str]:
        """A window to open, and the path of the capture's spec on the host."""
        first, ceiling = self.data.sequences[0], self._ceiling()
        settings = self._settings(first.token_ids[: first.prompt_length])
        if ceiling is None:
            return Window(self.host, settings, self._phase), self.results.put_spec(wanted)
        _, mib = beside.choose(self.host.gpus().gpus, ceiling, self.host.name)
        # The job's own account is not quite what the driver counts; who is over the ceiling is ended.
        spec = self.results.put_spec(wanted, max_gpu_memory=int(_OWN_SHARE * mib))
        return BesideWindow(self.host, settings, replace(ceiling, mib=mib), self._phase), spec

    def _kept(self, wanted: Sequence[CachedSequence], done: dict[str, Any], window_id: str) -> str:
        """Bring over what was captured before the window ended badly; says what became of it."""
        try:
            self.results.fetch(wanted, done["files"], window_id)
        except HostError as error:
            return f"the captured states wait in {self.results.directory} for the next run ({error})"
        return f"the {len(wanted)} captured states are in {self.data.store.root}"

    def wait(self) -> None:
        """Until no other run has the host, as long as `window.wait_for_lease` says. Raises WindowError."""
        wait_until_free(self.host, self.config.window.wait_for_lease, self.say)

    def _phase(self, event: PhaseEvent) -> None:
        self.say(f"window {event.seconds:6.1f} s  {event.phase.value:9} {event.detail}")

    def _checks(self, wanted: Sequence[CachedSequence], unasked: Sequence[str]) -> list[Check]:
        cap = self.config.completions.max_new_tokens
        tokens = sum(len(s.token_ids) for s in wanted) + len(unasked) * 4 * cap  # prompts of those are not known here
        expected = self._speeds().estimate(len(wanted) + len(unasked), tokens)
        downtime = expect_downtime(self.host, stop_s=30.0, job_s=expected.seconds)
        if wanted or unasked:
            self.say(f"the capture is expected to take {expected.seconds:.0f} s ({expected.source})")
        disk = 64 + tokens * (len(self.survey.taps) + 1) * self.survey.target.hidden_size * 2 // 2**20
        budget, ceiling = self.config.host.downtime_budget, self._ceiling()
        extra = [partial(beside.room, self.host, ceiling)] if ceiling else []
        downtime = Downtime(0.0, 0.0, 0.0, "it is not stopped") if ceiling else downtime
        return preflight(
            self.host, downtime=downtime, budget_s=budget, disk_mib=disk, extra=extra, window=self._settings((1,))
        )

    def _speeds(self) -> Speeds:
        return Speeds(self.survey.cache, self.data.identity, self.config.capture.engine)

    def _ceiling(self) -> Ceiling | None:
        capture = self.config.capture
        return Ceiling(capture.max_gpu_memory) if capture.beside else None

    def _settings(self, canary: tuple[int, ...]) -> WindowSettings:
        times = self.config.window
        return WindowSettings(
            canary_input_ids=canary,
            ttl_s=times.ttl,
            stop_timeout_s=times.stop_timeout,
            free_timeout_s=times.free_timeout,
            escalate_after_s=times.escalate_after,
            start_timeout_s=times.start_timeout,
            verify_requests=times.verify_requests,
            drain_s=times.drain,
            on_busy="stop" if times.on_busy == "abort" else "give up",
            notify=times.notify,
            webhook=times.webhook,
        )
