"""From a host and a configuration to cached states: completions, then the store, then a window if something is missing."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taugate.config_schema import GateConfig
from taugate.drafter.checkpoint import DrafterConfig
from taugate.drafter.replay import CachedSequence
from taugate.errors import CheckpointError, HostError, JobError, StoreError, WindowError
from taugate.files import sha256_file, sha256_json
from taugate.host.host import Host
from taugate.host.preflight import Check, expect_downtime, preflight, require
from taugate.host.record import WindowSettings
from taugate.host.sglang import ServerIdentity
from taugate.host.window import PhaseEvent, Window
from taugate.pipeline.completions import CompletionStore, complete
from taugate.pipeline.prompts import read_prompts, render
from taugate.pipeline.remote import PACKAGE, RemotePackage, install
from taugate.target.capture import code_sha256
from taugate.target.checkpoint import TargetInfo
from taugate.target.head import read_bundle
from taugate.target.store import FINAL_HIDDEN, StateIdentity, StateStore, tap_name

Say = Callable[[str], None]
Record = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Dataset:
    """Everything a replay needs: sequences, where their states are, and the target's embedding and head."""

    target: TargetInfo
    sequences: tuple[CachedSequence, ...]
    identity: StateIdentity
    store: StateStore
    bundle: Path

    def key(self, sequence: CachedSequence) -> str:
        return self.identity.key(sequence.token_ids)

    def states(self, sequence: CachedSequence, names: Sequence[str]) -> dict[str, Any]:
        """Tensors [S, H] by name. Raises StoreError for missing or damaged ones."""
        return self.store.load(self.key(sequence), names)

    def head(self, dtype: str = "float32") -> Any:
        """The HeadBundle. Raises StoreError if it belongs to other weights."""
        bundle = read_bundle(self.bundle, dtype)
        if bundle.weights_sha256 != self.target.weights_sha256:
            raise StoreError(f"{self.bundle} belongs to another target; delete it to fetch the right one")
        return bundle


class Acquisition:
    """One run of the pipeline up to cached states. `say` gets progress lines, `record` evidence records."""

    def __init__(self, host: Host, config: GateConfig, drafters: Sequence[DrafterConfig], say: Say, record: Record) -> None:
        self.host, self.config, self.say, self.record = host, config, say, record
        self.taps = sorted({tap for drafter in drafters for tap in drafter.target_layer_ids})
        self.cache = config.store.path
        self._require_server()
        self.identity: ServerIdentity = host.server.identity()
        self.package: RemotePackage = install(host, self.cache / "scratch")
        self.probe = self._probe()
        self.target = TargetInfo.from_json(self.probe["target"])
        self._check_taps(drafters)

    def dataset(self, armed: bool, always: bool = False, dry_run: bool = False) -> Dataset:
        """Complete every prompt, capture what the store lacks, fetch the head bundle.

        armed: whether a window may be opened; always: open one even if nothing is missing. Raises StoreError when
        states are missing and no window may be opened, PreflightError with the server untouched, WindowError.
        """
        sequences = self._completions()
        identity = self._state_identity()
        store = StateStore(self.cache, self.target.name)
        data = Dataset(self.target, tuple(sequences), identity, store, self._bundle_path())
        self.record(self._provenance(data))
        names = [*map(tap_name, self.taps), FINAL_HIDDEN]
        missing = [s for s in sequences if store.missing(data.key(s), names)]
        wanted = list(sequences) if always else missing
        if wanted and not armed and not dry_run:
            key = data.key(wanted[0])
            raise StoreError(
                f"{len(missing)} of {len(sequences)} states are not in {store.root}, the first is key {key[:16]}… "
                f"of prompt {wanted[0].prompt_id!r}; `pytest -m gpu_window` opens a window and captures them"
            )
        if dry_run:
            self._plan(data, wanted)
            return data
        if wanted:
            self._capture(data, wanted)
        else:
            self._not_needed(len(sequences))
        self._fetch_bundle()
        return data

    # -- before any window ------------------------------------------------------------------------------------

    def _require_server(self) -> None:
        """The unit and its server answer at all; both are asked before anything is read or written on the host."""
        state = self.host.unit.show()
        if state.load != "loaded":
            raise HostError(
                f"unit {self.host.unit.name} is {state.load} on {self.host.name}; set `service` in the profile to the unit "
                "that serves the target"
            )
        if not self.host.server.ready():
            raise HostError(f"{self.host.server.where} is not ready ({self.host.unit.name} is {state.active}); start it, or correct `port`")
        served = self.host.server.identity().model_id
        expected = self.host.settings.expected_model_id
        if expected not in (None, served):
            raise HostError(f"{self.host.server.where} serves {served!r}, but `model_id` is {expected!r}; correct one of them")

    def _probe(self) -> dict[str, Any]:
        path = self.config.target.path or self.identity.model_path
        if self.config.target.path and self.config.target.path != self.identity.model_path:
            raise HostError(
                f"target.path is {path!r}, but the server serves {self.identity.model_path!r}; correct one of them"
            )
        memo = f"{self.host.work_dir}/hashes.json"
        self.say(f"asking {self.host.name} for its Python and the checkpoint {path}")
        probe = self.package.run(
            "target.probe", "--model-path", path, "--memo", memo, deadline=3600, what="the probe of the host's Python"
        )
        if probe["missing"]:
            raise HostError(
                f"the Python {self.host.remote_python} on {self.host.name} lacks {', '.join(probe['missing'])}; "
                "install them there or set `remote_python`"
            )
        if self.config.capture.kernel_path == "fla" and not probe["fla"]:
            raise HostError(
                f'capture.kernel_path is "fla", but {self.host.remote_python} on {self.host.name} has no fla; '
                "install flash-linear-attention there"
            )
        return probe | {"model_path": path}

    def _check_taps(self, drafters: Sequence[DrafterConfig]) -> None:
        target = self.target
        for drafter in drafters:
            if drafter.num_target_layers != target.num_layers or drafter.hidden_size != target.hidden_size:
                raise CheckpointError(
                    f"a drafter for {drafter.num_target_layers} layers of width {drafter.hidden_size} does not fit target "
                    f"{target.name} with {target.num_layers} layers of width {target.hidden_size}"
                )
            if drafter.vocab_size != target.vocab_size:
                raise CheckpointError(
                    f"a drafter with a vocabulary of {drafter.vocab_size} does not fit target {target.name}, which has {target.vocab_size}"
                )
            if target.num_layers - 1 in drafter.target_layer_ids:
                raise CheckpointError(
                    f"a drafter taps the last layer {target.num_layers - 1}, which trainers take before or after the final "
                    "norm; its config does not say which, so it cannot be judged"
                )

    def _completions(self) -> list[CachedSequence]:
        wanted = self.config.completions
        if wanted.prompts is None:
            raise HostError("completions.prompts is not set; name a JSON-lines file of prompts")
        prompts = read_prompts(wanted.prompts, wanted.limit)
        ids = render(prompts, self._tokenizer())

        def progress(done: int, of: int) -> None:
            if done == of or done % 8 == 0:
                self.say(f"completions {done}/{of}")

        return complete(
            self.host.server, self.identity, self.target, prompts, ids, wanted.max_new_tokens, CompletionStore(self.cache), progress
        )

    def _tokenizer(self) -> Path:
        """The target's tokenizer files on this machine, fetched once by content."""
        directory = self.cache / "tokenizers" / self.target.tokenizer_sha256
        if not directory.is_dir():
            directory.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=directory.parent))
            for remote in self.probe["tokenizer_files"]:
                self.host.transport.get(remote, partial / Path(remote).name)
            partial.replace(directory)
        return directory

    def _state_identity(self) -> StateIdentity:
        capture = self.config.capture
        kept = ["torch", "transformers", *(["flash-linear-attention", "fla-core", "triton"] if capture.kernel_path == "fla" else [])]
        return StateIdentity(
            target=self.target.name,
            weights_sha256=self.target.weights_sha256,
            tokenizer_sha256=self.target.tokenizer_sha256,
            dtype=capture.dtype,
            kernel_path=capture.kernel_path,
            device=self._device(),
            versions={name: self.probe["versions"][name] for name in kept if name in self.probe["versions"]},
            capture_code_sha256=code_sha256(PACKAGE),
        )

    def _device(self) -> str:
        """"cpu", or the names of the GPUs: the same kernels round differently on different hardware."""
        if self.config.capture.device == "cpu" or self.probe["cuda"] is None:
            return "cpu"
        return "+".join(sorted({gpu.name for gpu in self.host.gpus().gpus}))

    def _provenance(self, data: Dataset) -> dict[str, Any]:
        return {
            "type": "provenance",
            "host": self.host.name,
            "model_id": self.identity.model_id,
            "model_path": self.identity.model_path,
            "server_version": self.identity.version,
            "weights_sha256": self.target.weights_sha256,
            "tokenizer_sha256": self.target.tokenizer_sha256,
            "kernel_path": data.identity.kernel_path,
            "capture_dtype": data.identity.dtype,
            "capture_device": data.identity.device,
            "versions": self.probe["versions"],
            "taps": self.taps,
            "prompts": len(data.sequences),
            "max_new_tokens": self.config.completions.max_new_tokens,
            "prompts_sha256": sha256_json([list(s.token_ids[: s.prompt_length]) for s in data.sequences]),
        }

    # -- the window -------------------------------------------------------------------------------------------

    def _checks(self, wanted: Sequence[CachedSequence]) -> list[Check]:
        downtime = expect_downtime(self.host, stop_s=30.0, job_s=20.0 + 0.5 * len(wanted))
        tokens = sum(len(s.token_ids) for s in wanted)
        disk = 64 + tokens * (len(self.taps) + 1) * self.target.hidden_size * 2 // 2**20
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

    def _plan(self, data: Dataset, wanted: Sequence[CachedSequence]) -> None:
        checks = self._checks(wanted)
        steps = [("ok   " if check.ok else "RED  ") + str(check) for check in checks]
        if wanted:
            unit = self.host.unit.name
            steps += [
                f"arm taugate-window.timer on the host for {self.config.window.ttl:g} s",
                f"systemctl stop {unit}, wait until its GPU memory is free",
                f"capture {len(wanted)} sequences, taps {self.taps}, as a transient unit",
                f"systemctl start {unit}, wait until {self.identity.model_id} answers, disarm the timer",
            ]
        else:
            steps.append(f"no window: all {len(data.sequences)} states are in {data.store.root}")
        self.record({"type": "plan", "steps": steps})

    def _not_needed(self, count: int) -> None:
        if not self.host.server.healthy():
            raise HostError(f"{self.host.server.where} is not healthy, although nothing was done to it")
        reason = f"all {count} states are cached; {self.identity.model_id} is healthy"
        self.say(f"window not needed: {reason}")
        self.record({"type": "window", "outcome": "not needed", "reason": reason, "phases": []})

    def _capture(self, data: Dataset, wanted: Sequence[CachedSequence]) -> None:
        require(self._checks(wanted))
        run = f"{self.host.work_dir}/capture-{sha256_json([data.key(s) for s in wanted])[:16]}"
        spec = {
            "model_path": self.probe["model_path"],
            "kernel_path": data.identity.kernel_path,
            "dtype": data.identity.dtype,
            "device": "cpu" if data.identity.device == "cpu" else "cuda",
            "taps": self.taps,
            "sequences": [{"key": data.key(s), "token_ids": list(s.token_ids)} for s in wanted],
        }
        self.host.transport.run(["mkdir", "-p", run], deadline=30).check(f"creating {run}")
        with tempfile.TemporaryDirectory(dir=self.cache) as scratch:
            local = Path(scratch) / "spec.json"
            local.write_text(json.dumps(spec))
            self.host.transport.put(local, f"{run}/spec.json")
            window = Window(self.host, self._settings(data.sequences[0]), self._phase)
            try:
                with window:
                    done = self.package.job(
                        window, "target.capture", "--spec", f"{run}/spec.json", "--out", f"{run}/out",
                        deadline_s=self.config.window.job_timeout, on_event=self._progress,
                    )  # fmt: skip
            finally:
                # Whatever happened inside, what became of the server is evidence.
                if window.record.phases:
                    self.record({"type": "window", **window.record.to_json()})
            if window.record.outcome != "restored":
                raise WindowError(f"window {window.record.window_id} ended {window.record.outcome or 'without a result'}")
            self._fetch_states(data, wanted, done, f"{run}/out", Path(scratch), window.record.window_id)
        self.host.transport.run(["rm", "-rf", run], deadline=60).check(f"removing {run}")

    def _fetch_states(
        self, data: Dataset, wanted: Sequence[CachedSequence], done: dict[str, Any], remote: str, scratch: Path, window_id: str
    ) -> None:
        """Bring the files over, compare their hashes with what the job said, and put them into the store."""
        provenance = {"window_id": window_id, "host": self.host.name, "kernels": done["kernels"], "device": done["device"]}
        for number, sequence in enumerate(wanted, 1):
            key = data.key(sequence)
            file = scratch / f"{key}.safetensors"
            got = self.host.transport.get(f"{remote}/{key}.safetensors", file)
            if got != done["files"][key]:
                raise JobError(f"the state of prompt {sequence.prompt_id!r} changed on its way from {self.host.name}; nothing of it was kept")
            data.store.adopt(key, file, data.identity.fields(sequence.token_ids), provenance)
            file.unlink()
            if number == len(wanted) or number % 16 == 0:
                self.say(f"fetched states {number}/{len(wanted)}")

    def _phase(self, event: PhaseEvent) -> None:
        self.say(f"window {event.seconds:6.1f} s  {event.phase.value:9} {event.detail}")

    def _progress(self, event: dict[str, Any]) -> None:
        if event["event"] == "state" and (event["done"] == event["of"] or event["done"] % 8 == 0):
            self.say(f"captured {event['done']}/{event['of']} sequences, {event['left_s']:.0f} s left")

    # -- after the window -------------------------------------------------------------------------------------

    def _bundle_path(self) -> Path:
        return self.cache / "heads" / f"{self.target.weights_sha256}.safetensors"

    def _fetch_bundle(self) -> None:
        path = self._bundle_path()
        if path.is_file():
            return
        remote = f"{self.host.work_dir}/head-{self.target.weights_sha256[:16]}.safetensors"
        made = self.package.run(
            "target.head", "--model-path", self.probe["model_path"], "--out", remote, deadline=1800, what="making the head bundle"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        if self.host.transport.get(remote, partial) != made["sha256"] or sha256_file(partial) != made["sha256"]:
            raise JobError(f"the head bundle changed on its way from {self.host.name}; run again to fetch it once more")
        shutil.move(partial, path)
        self.say(f"fetched the head bundle, {path.stat().st_size / 2**20:.1f} MiB")
