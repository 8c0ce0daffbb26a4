"""Results of captures between the host and the store: what lies there already, and bringing it over.

All captures write to one directory, work_dir/captures, by key. So what a window has captured is not lost when fetching
breaks off, or when the next run wants other prompts: it is looked for before a window is opened.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taugate.drafter.replay import CachedSequence
from taugate.errors import HostError, JobError
from taugate.files import sha256_json
from taugate.pipeline.bar import Bar, size
from taugate.pipeline.dataset import Dataset
from taugate.pipeline.survey import Survey
from taugate.target.here import Wanted, adopt_results
from taugate.target.results import Results

_KEPT_DAYS = 14  # on the host, for results that nobody fetches


class HostResults:
    """The captures' directory on the surveyed host, as seen by one data set."""

    def __init__(self, survey: Survey, data: Dataset) -> None:
        self.survey, self.data = survey, data
        self.host = survey.host
        self.directory = f"{self.host.work_dir}/captures"

    def put_spec(self, wanted: Sequence[CachedSequence], max_gpu_memory: int | None = None) -> str:
        """Put the spec of a capture of these sequences on the host; returns its path there. Raises HostError.

        max_gpu_memory: MiB, instead of the configured one.
        """
        identity, config = self.data.identity, self.survey.config.capture
        config = config if max_gpu_memory is None else config.model_copy(update={"max_gpu_memory": max_gpu_memory})
        device = "cpu" if identity.device == "cpu" else "cuda"
        what = Wanted(identity.kernel_path, identity.dtype, device, tuple(self.survey.taps), options=_options(config))
        spec = what.spec(Path(self.survey.model_path), device, {self.data.key(s): s.token_ids for s in wanted})
        path = f"{self.directory}/spec-{sha256_json(spec)[:16]}.json"
        with tempfile.TemporaryDirectory(dir=self.survey.cache) as scratch:
            local = Path(scratch) / "spec.json"
            local.write_text(json.dumps(spec))
            self.host.transport.put(local, path)
        return path

    def forget_spec(self, path: str) -> None:
        self.host.transport.run(["rm", "-f", path], deadline=60).check(f"removing {path}")

    def fetch_waiting(self, wanted: Sequence[CachedSequence]) -> list[CachedSequence]:
        """Fetch those of `wanted` that an earlier run captured and did not bring over; returns the others.

        Needs no window. Raises HostError, JobError.
        """
        if self.host.transport.run(["test", "-d", self.directory], deadline=30).rc != 0:
            return list(wanted)
        spec = self.put_spec(wanted)
        told = self.survey.package.run(
            "target.results", "--spec", spec, "--out", self.directory, deadline=600, what="looking for earlier results"
        )
        self.forget_spec(spec)
        waiting = [s for s in wanted if self.data.key(s) in told["files"]]
        if waiting:
            self.survey.say(f"{len(waiting)} states of an earlier capture are still on {self.host.name}")
            self.fetch(waiting, told["files"], "an earlier window")
        return [s for s in wanted if self.data.key(s) not in told["files"]]

    def fetch(self, wanted: Sequence[CachedSequence], files: Mapping[str, Mapping[str, Any]], window_id: str) -> None:
        """Bring these results over, compare their hashes with what the job said, put them into the store, and remove
        them from the host. Each is in the store before the next is fetched. Raises HostError, JobError.
        """
        fetched: list[str] = []
        try:
            self._fetch(wanted, files, window_id, fetched)
        finally:
            # Also when the rest could not be had: what is in the store by now is not fetched again.
            with contextlib.suppress(HostError):
                self._forget(fetched)

    def _fetch(
        self,
        wanted: Sequence[CachedSequence],
        files: Mapping[str, Mapping[str, Any]],
        window_id: str,
        fetched: list[str],
    ) -> None:
        bar, of = Bar(self.survey.say, "fetch"), sum(files[self.data.key(s)]["bytes"] for s in wanted)
        origin = {"window_id": window_id, "host": self.host.name}
        done = 0
        with tempfile.TemporaryDirectory(dir=self.survey.cache) as scratch:
            here = Results(Path(scratch))
            for number, sequence in enumerate(wanted, 1):
                key = self.data.key(sequence)
                got = self.host.transport.get(f"{self.directory}/{key}.safetensors", here.file(key))
                if got != files[key]["sha256"]:
                    raise JobError(
                        f"the state of prompt {sequence.prompt_id!r} changed on its way from {self.host.name}; "
                        "nothing of it was kept"
                    )
                adopt_results(
                    self.data.store, self.data.identity, {key: sequence.token_ids}, here, {key: files[key]}, origin
                )
                fetched.append(key)
                done += files[key]["bytes"]
                bar(done, of, f"{number}/{len(wanted)} states, {size(done)} of {size(of)}")

    def _forget(self, keys: Sequence[str]) -> None:
        paths = [f"{self.directory}/{key}.{end}" for key in keys for end in ("json", "safetensors")]
        for first in range(0, len(paths), 200):  # a command line has its limits
            some = paths[first : first + 200]
            self.host.transport.run(["rm", "-f", *some], deadline=60).check("removing fetched results")
        # What a connection that broke has left behind, or a run that nobody repeated.
        old = ["find", self.directory, "-maxdepth", "1", "-type", "f", "-mtime", f"+{_KEPT_DAYS}", "-delete"]
        self.host.transport.run(old, deadline=60).check("removing old results")


def _options(capture: Any) -> dict[str, Any]:
    """Engine and memory ceiling, as far as the configuration has them."""
    return {name: getattr(capture, name) for name in ("engine", "max_gpu_memory") if hasattr(capture, name)}
