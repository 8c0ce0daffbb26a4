"""The window around a capture: checks and plan before it, states and head bundle fetched after it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taugate.drafter.replay import CachedSequence
from taugate.errors import HostError, JobError, WindowError
from taugate.files import sha256_file, sha256_json
from taugate.host.preflight import Check, expect_downtime, preflight, require
from taugate.host.record import WindowSettings
from taugate.host.window import PhaseEvent, Window
from taugate.pipeline.dataset import Dataset
from taugate.pipeline.survey import Record, Survey


class Borrower:
    """Fills a data set's gaps from the surveyed host. `record` gets evidence records."""

    def __init__(self, survey: Survey, data: Dataset, record: Record) -> None:
        self.survey, self.data, self.record = survey, data, record
        self.host, self.config, self.say = survey.host, survey.config, survey.say

    def plan(self, wanted: Sequence[CachedSequence]) -> None:
        """Record what a run would do. Raises PreflightError if a check is red: such a run would end there."""
        checks = self._checks(wanted, self.survey.unasked)
        steps = [("ok   " if check.ok else "RED  ") + str(check) for check in checks]
        unasked = len(self.survey.unasked)
        if unasked:
            steps.append(f"ask {self.survey.identity.model_id} for {unasked} completions, one by one")
        if wanted or unasked:
            unit = self.host.unit.name
            steps += [
                f"arm taugate-window.timer on the host for {self.config.window.ttl:g} s",
                f"systemctl stop {unit}, wait until its GPU memory is free",
                f"capture {len(wanted) + unasked} sequences, taps {self.survey.taps}, as a transient unit",
                f"systemctl start {unit}, wait until {self.survey.identity.model_id} answers, disarm the timer",
            ]
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

        Raises PreflightError with the server untouched, WindowError, JobError. An interrupted capture leaves its
        complete files on the host, and the next one goes on from them.
        """
        require(self._checks(wanted, ()))
        run = f"{self.host.work_dir}/capture-{sha256_json([self.data.key(s) for s in wanted])[:16]}"
        spec = {
            "model_path": self.survey.model_path,
            "kernel_path": self.data.identity.kernel_path,
            "dtype": self.data.identity.dtype,
            "device": "cpu" if self.data.identity.device == "cpu" else "cuda",
            "taps": self.survey.taps,
            "sequences": [{"key": self.data.key(s), "token_ids": list(s.token_ids)} for s in wanted],
        }
        self.host.transport.run(["mkdir", "-p", run], deadline=30).check(f"creating {run}")
        with tempfile.TemporaryDirectory(dir=self.survey.cache) as scratch:
            local = Path(scratch) / "spec.json"
            local.write_text(json.dumps(spec))
            self.host.transport.put(local, f"{run}/spec.json")
            window = Window(self.host, self._settings(self.data.sequences[0]), self._phase)
            try:
                with window:
                    done = self.survey.package.job(
                        window, "target.capture", "--spec", f"{run}/spec.json", "--out", f"{run}/out",
                        deadline_s=self.config.window.job_timeout, on_event=self._progress,
                    )  # fmt: skip
            finally:
                # Whatever happened inside, what became of the server is evidence.
                if window.record.phases:
                    self.record({"type": "window", **window.record.to_json()})
            if window.record.outcome != "restored":
                raise WindowError(
                    f"window {window.record.window_id} ended {window.record.outcome or 'without a result'}"
                )
            self._fetch_states(wanted, done, f"{run}/out", Path(scratch), window.record.window_id)
        self.host.transport.run(["rm", "-rf", run], deadline=60).check(f"removing {run}")

    def _fetch_states(
        self,
        wanted: Sequence[CachedSequence],
        done: dict[str, Any],
        remote: str,
        scratch: Path,
        window_id: str,
    ) -> None:
        """Bring the files over, compare their hashes with what the job said, and put them into the store."""
        provenance = {
            "window_id": window_id,
            "host": self.host.name,
            "kernels": done["kernels"],
            "device": done["device"],
        }
        for number, sequence in enumerate(wanted, 1):
            key = self.data.key(sequence)
            file = scratch / f"{key}.safetensors"
            got = self.host.transport.get(f"{remote}/{key}.safetensors", file)
            if got != done["files"][key]:
                raise JobError(
                    f"the state of prompt {sequence.prompt_id!r} changed on its way from {self.host.name}; "
                    "nothing of it was kept"
                )
            self.data.store.adopt(key, file, self.data.identity.fields(sequence.token_ids), provenance)
            file.unlink()
            if number == len(wanted) or number % 16 == 0:
                self.say(f"fetched states {number}/{len(wanted)}")

    def _phase(self, event: PhaseEvent) -> None:
        self.say(f"window {event.seconds:6.1f} s  {event.phase.value:9} {event.detail}")

    def _progress(self, event: dict[str, Any]) -> None:
        if event["event"] == "state" and (event["done"] == event["of"] or event["done"] % 8 == 0):
            self.say(f"captured {event['done']}/{event['of']} sequences, {event['left_s']:.0f} s left")

    def fetch_bundle(self) -> None:
        """Bring the target's embedding and head over, once per target. Raises HostError, JobError."""
        path = self.data.bundle
        if path.is_file():
            return
        remote = f"{self.host.work_dir}/head-{self.survey.target.weights_sha256[:16]}.safetensors"
        made = self.survey.package.run(
            "target.head",
            "--model-path",
            self.survey.model_path,
            "--out",
            remote,
            deadline=1800,
            what="making the head bundle",
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        if self.host.transport.get(remote, partial) != made["sha256"] or sha256_file(partial) != made["sha256"]:
            raise JobError(f"the head bundle changed on its way from {self.host.name}; run again to fetch it once more")
        shutil.move(partial, path)
        self.host.transport.run(["rm", "-f", remote], deadline=60).check(f"removing {remote}")
        self.say(f"fetched the head bundle, {path.stat().st_size / 2**20:.1f} MiB")

    def _checks(self, wanted: Sequence[CachedSequence], unasked: Sequence[str]) -> list[Check]:
        downtime = expect_downtime(self.host, stop_s=30.0, job_s=20.0 + 0.5 * (len(wanted) + len(unasked)))
        cap = self.config.completions.max_new_tokens
        tokens = sum(len(s.token_ids) for s in wanted) + len(unasked) * 4 * cap  # prompts of those are not known here
        disk = 64 + tokens * (len(self.survey.taps) + 1) * self.survey.target.hidden_size * 2 // 2**20
        return preflight(self.host, downtime=downtime, budget_s=self.config.host.downtime_budget, disk_mib=disk)

    def _settings(self, canary: CachedSequence) -> WindowSettings:
        times = self.config.window
        return WindowSettings(
            canary_input_ids=canary.token_ids[: canary.prompt_length],
            ttl_s=times.ttl,
            stop_timeout_s=times.stop_timeout,
            free_timeout_s=times.free_timeout,
            escalate_after_s=times.escalate_after,
            start_timeout_s=times.start_timeout,
        )
