"""Everything that is found out before any window: the server, the host's Python, the checkpoint, the completions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from taugate.config_schema import GateConfig
from taugate.drafter.checkpoint import DrafterConfig
from taugate.drafter.replay import CachedSequence
from taugate.errors import CheckpointError, HostError
from taugate.files import sha256_json
from taugate.host.host import Host
from taugate.host.sglang import ServerIdentity
from taugate.pipeline.bar import CaptureBar, Say
from taugate.pipeline.completions import CompletionStore, complete
from taugate.pipeline.dataset import Dataset
from taugate.pipeline.prompts import read_prompts, render
from taugate.pipeline.remote import PACKAGE, RemotePackage, install
from taugate.target.capture import code_sha256
from taugate.target.checkpoint import TargetInfo
from taugate.target.head import HeadStore
from taugate.target.here import relevant_versions
from taugate.target.kernels import require_device
from taugate.target.probe import KERNEL_PACKAGES
from taugate.target.store import StateIdentity, StateStore

Record = Callable[[dict[str, Any]], None]

_HASHING_S = 3600  # the first time, every byte of the checkpoint is read


class Survey:
    """What the host serves and has, asked without touching its server. `say` gets progress lines.

    Raises HostError, CheckpointError or KernelPathError, one sentence, for anything that would make a window pointless.
    """

    def __init__(self, host: Host, config: GateConfig, drafters: Sequence[DrafterConfig], say: Say) -> None:
        self.host, self.config, self.say = host, config, say
        self.taps = sorted({tap for drafter in drafters for tap in drafter.target_layer_ids})
        self.cache = config.store.path
        self._require_server()
        self.identity: ServerIdentity = host.server.identity()
        self.package: RemotePackage = install(host, self.cache / "scratch")
        self.probe = self._probe()
        self.model_path: str = self.probe["model_path"]
        self.target = TargetInfo.from_json(self.probe["target"])
        self._check_taps(drafters)
        self.unasked: list[str] = []

    def dataset(self, ask: bool) -> Dataset:
        """Every prompt that is completed; states may still be missing.

        ask: whether the server is asked for completions that are not cached. If not, `unasked` has their keys.
        """
        sequences, self.unasked = self._completions(ask)
        store = StateStore(self.cache, self.target.name)
        return Dataset(self.target, tuple(sequences), self._state_identity(), store, HeadStore(self.cache))

    def provenance(self, data: Dataset) -> dict[str, Any]:
        """The record that says where every number of this run comes from."""
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

    def _require_server(self) -> None:
        """The unit and its server answer at all; both are asked before anything is read or written on the host."""
        state = self.host.unit.show()
        if state.load != "loaded":
            raise HostError(
                f"unit {self.host.unit.name} is {state.load} on {self.host.name}; set `service` in the profile to "
                "the unit that serves the target"
            )
        if not self.host.server.ready():
            raise HostError(
                f"{self.host.server.where} is not ready ({self.host.unit.name} is {state.active}); "
                "start it, or correct `port`"
            )
        served = self.host.server.identity().model_id
        expected = self.host.settings.expected_model_id
        if expected not in (None, served):
            raise HostError(
                f"{self.host.server.where} serves {served!r}, but `model_id` is {expected!r}; correct one of them"
            )

    def _probe(self) -> dict[str, Any]:
        path = self.config.target.path or self.identity.model_path
        if self.config.target.path and self.config.target.path != self.identity.model_path:
            raise HostError(
                f"target.path is {path!r}, but the server serves {self.identity.model_path!r}; correct one of them"
            )
        memo = f"{self.host.work_dir}/hashes.json"
        self.say(f"asking {self.host.name} for its Python and the checkpoint {path}")
        probe = self.package.run(
            "target.probe",
            "--model-path",
            path,
            "--memo",
            memo,
            deadline=_HASHING_S,
            what="the probe of the host's Python and checkpoint",
            on_event=CaptureBar(self.say),
        )
        if probe["missing"]:
            raise HostError(
                f"the Python {self.host.remote_python} on {self.host.name} lacks {', '.join(probe['missing'])}; "
                "install them there or set `remote_python`"
            )
        self._check_kernels(probe)
        return probe

    def _check_kernels(self, probe: Mapping[str, Any]) -> None:
        """What the capture is to run on and with is there."""
        capture, python = self.config.capture, f"{self.host.remote_python} on {self.host.name}"
        if capture.kernel_path not in probe["paths"]:
            package = KERNEL_PACKAGES[capture.kernel_path]
            raise HostError(
                f'capture.kernel_path is "{capture.kernel_path}", but {python} has no {package}; install '
                f"{'flash-linear-attention' if package == 'fla' else package} there"
            )
        if capture.device == "cuda" and probe["cuda"] is None:
            raise HostError(
                f'capture.device is "cuda", but the torch of {python} is built for CPUs; install one for its GPUs'
            )
        device = "cpu" if capture.device == "cpu" or probe["cuda"] is None else "cuda"
        require_device(capture.kernel_path, probe["target"]["model_type"], device)

    def _check_taps(self, drafters: Sequence[DrafterConfig]) -> None:
        target = self.target
        for drafter in drafters:
            if drafter.num_target_layers not in (None, target.num_layers) or drafter.hidden_size != target.hidden_size:
                raise CheckpointError(
                    f"a drafter for {drafter.num_target_layers} layers of width {drafter.hidden_size} does not fit "
                    f"target {target.name} with {target.num_layers} layers of width {target.hidden_size}"
                )
            if drafter.vocab_size != target.vocab_size:
                raise CheckpointError(
                    f"a drafter with a vocabulary of {drafter.vocab_size} does not fit target {target.name}, "
                    f"which has {target.vocab_size}"
                )
            if outside := [tap for tap in drafter.target_layer_ids if not 0 <= tap < target.num_layers]:
                raise CheckpointError(
                    f"a drafter taps layers {outside}, but target {target.name} has layers 0…{target.num_layers - 1}"
                )
            if target.num_layers - 1 in drafter.target_layer_ids:
                raise CheckpointError(
                    f"a drafter taps the last layer {target.num_layers - 1}, which trainers take before or after the "
                    "final norm; its config does not say which, so it cannot be judged"
                )

    def _completions(self, ask: bool) -> tuple[list[CachedSequence], list[str]]:
        wanted = self.config.completions
        if wanted.prompts is None:
            raise HostError("completions.prompts is not set; name a JSON-lines file of prompts")
        prompts = read_prompts(wanted.prompts, wanted.limit)
        ids = render(prompts, self._tokenizer())

        def progress(done: int, of: int) -> None:
            if done == of or done % 8 == 0:
                self.say(f"completions {done}/{of}")

        return complete(
            self.host.server,
            self.identity,
            self.target,
            prompts,
            ids,
            wanted.max_new_tokens,
            CompletionStore(self.cache),
            progress,
            ask,
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
        return StateIdentity(
            target=self.target.name,
            weights_sha256=self.target.weights_sha256,
            tokenizer_sha256=self.target.tokenizer_sha256,
            dtype=capture.dtype,
            kernel_path=capture.kernel_path,
            device=self._device(),
            versions=relevant_versions(capture.kernel_path, self.probe["versions"]),
            capture_code_sha256=code_sha256(PACKAGE),
        )

    def _device(self) -> str:
        """ "cpu", or the names of the GPUs: the same kernels round differently on different hardware."""
        if self.config.capture.device == "cpu" or self.probe["cuda"] is None:
            return "cpu"
        return "+".join(sorted({gpu.name for gpu in self.host.gpus().gpus}))
