"""The shape of gate.toml: every key with its type, default and limits. Resolving them is `taugate.config`."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?(MiB|GiB)")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")


def parse_duration(value: object) -> float:
    """Seconds in a duration such as "90s", "20m" or "1h30m". Raises ValueError for anything else."""
    text = str(value).strip().lower()
    if isinstance(value, bool) or not _DURATION.fullmatch(text):
        raise ValueError('write a duration with its unit, such as "90s", "20m" or "1h30m"')
    return float(sum(float(n) * _UNITS[unit] for n, unit in re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)))


def parse_memory(value: object) -> int | None:
    """MiB in a size such as "6GiB" or "800 MiB"; "auto" is None. Raises ValueError for anything else."""
    if value in (None, "auto"):
        return None
    found = _MEMORY.fullmatch(str(value).strip())
    if not found or not (mib := int(float(found[1]) * (1024 if found[2] == "GiB" else 1))):
        raise ValueError('write "auto" or a size with its unit, such as "6GiB" or "800MiB"')
    return mib


def _positive(seconds: float) -> float:
    if seconds <= 0:
        raise ValueError("must be longer than zero")
    return seconds


def _as_list(value: object) -> object:
    return [value] if isinstance(value, (str, Path)) else value


def _not_bool(value: object) -> object:
    if isinstance(value, bool):  # pydantic would read true as 1
        raise ValueError("must be a number, not true or false")
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


Text = Annotated[str, AfterValidator(_not_blank)]
Duration = Annotated[float, BeforeValidator(parse_duration), AfterValidator(_positive)]
Memory = Annotated[int | None, BeforeValidator(parse_memory)]  # MiB; None: whatever is free
Wait = Annotated[float, BeforeValidator(parse_duration)]  # may be "0s": not at all
Whole = Annotated[int, BeforeValidator(_not_bool)]
Number = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
Words = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_as_list)]

_URL = r"^https?://\S+$"
_VERIFIER = r"^(chain|ddtree-[1-9]\d*|topk-[1-9]\d*)$"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


PROFILE_DEFAULTS: dict[str, dict[str, object]] = {
    "embedded": {},
    "local": {"port": 30000, "work_dir": "/var/tmp/taugate", "cgroup_root": "/sys/fs/cgroup"},
}
PROFILE_DEFAULTS["ssh"] = PROFILE_DEFAULTS["local"]
_NEEDED: dict[str, tuple[str, ...]] = {
    "embedded": (),
    "ssh": ("host", "service", "remote_python"),
    "local": ("service", "remote_python"),
}


class HostProfile(Section):
    """One host. For kind "embedded" None means: as the embedded host says; what is set here replaces that.

    `Path` is a path on this machine (the resolver makes it absolute); paths on the host are text.
    """

    kind: Literal["embedded", "ssh", "local"] = "embedded"
    host: Text | None = None
    ssh_port: Annotated[Whole, Field(ge=1, le=65535)] | None = None
    user: Text | None = None
    key: Path | None = None
    known_hosts: Path | None = None
    host_key_fingerprint: Words = ()
    ssh_config: Path | None = None
    service: Text | None = None
    port: Annotated[Whole, Field(ge=1, le=65535)] | None = None
    remote_python: Text | None = None
    work_dir: Text | None = None
    cgroup_root: Text | None = None
    downtime_budget: Duration = 20 * 60.0
    model_id: Text | None = None
    fault: Words = ()
    attach: Path | None = None

    @model_validator(mode="after")
    def _complete(self) -> HostProfile:
        missing = [name for name in _NEEDED[self.kind] if getattr(self, name) is None]
        if missing:
            raise ValueError(f'a profile of kind "{self.kind}" also needs {", ".join(missing)}')
        only = [name for name in ("fault", "attach") if getattr(self, name)]
        if self.kind != "embedded" and only:
            raise ValueError(f'{", ".join(only)} belongs to profiles of kind "embedded" only')
        return self


class Target(Section):
    path: Text | None = None


class Completions(Section):
    prompts: Path | None = None
    limit: Annotated[Whole, Field(ge=1)] | None = None
    max_new_tokens: Annotated[Whole, Field(ge=2)] = 80


class Capture(Section):
    kernel_path: Literal["torch", "fla", "hub", "flash_qla"] = "torch"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    engine: Literal["auto", "resident", "streamed"] = "auto"
    max_gpu_memory: Memory = None
    beside: bool = False


class Drafters(Section):
    candidate: Paths = ()
    reference: Path | None = None


class GateRule(Section):
    """One threshold. At least one of `min_tau` and `max_loss_to_reference` is set."""

    drafter: Text = "candidate"
    verifier: Annotated[str, Field(pattern=_VERIFIER)] = "chain"
    min_tau: Annotated[Number, Field(ge=1)] | None = None
    max_loss_to_reference: Annotated[Number, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _gates_something(self) -> GateRule:
        if self.min_tau is None and self.max_loss_to_reference is None:
            raise ValueError("needs min_tau, max_loss_to_reference or both")
        return self


class Statistics(Section):
    draws: Annotated[Whole, Field(ge=100)] = 2000
    seed: Whole = 0
    tail: Annotated[Number, Field(gt=0, lt=0.5)] = 0.05
    min_prompts: Annotated[Whole, Field(ge=2)] = 30


def _here(value: str) -> str:
    if value == "host":
        raise ValueError(
            "drafters cannot be replayed on the host yet; leave it out: the head bundle is fetched here once per "
            "target, and an interrupted fetch goes on where it was"
        )
    return value


class Replay(Section):
    where: Annotated[Literal["here", "host"], AfterValidator(_here)] = "here"
    device: Text = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    anchors: Annotated[Whole, Field(ge=1)] = 32
    temperature: Annotated[Number, Field(ge=0)] = 1.0


class Fidelity(Section):
    min_on_policy: Annotated[Number, Field(ge=0, le=1)] = 0.99
    noise: Annotated[Number, Field(ge=0, lt=1)] = 0.005


class BudgetRule(Section):
    """What one path may be off at one level: a limit for each quantity, why it is that, and since when."""

    level: Literal["core", "layer", "propagated", "logits"]
    dtype: Literal["fp32", "tf32", "bf16"]
    path: Text
    unit: Literal["f", "relative", "ratio", "nats", "share"]
    limits: dict[Text, Annotated[Number, Field(ge=0)]]
    reason: Text
    date: date


class Numerics(Section):
    budget: dict[Text, BudgetRule] = {}


class WindowTimes(Section):
    ttl: Duration = 600.0
    stop_timeout: Duration = 120.0
    free_timeout: Duration = 120.0
    escalate_after: Duration = 15.0
    start_timeout: Duration = 900.0
    job_timeout: Duration = 1800.0
    drain: Wait = 30.0
    on_busy: Literal["abort", "give_up"] = "abort"
    wait_for_lease: Wait = 0.0
    verify_requests: Annotated[Whole, Field(ge=2)] = 4
    notify: Words = ()
    webhook: Annotated[str, Field(pattern=_URL)] | None = None


class Store(Section):
    path: Path = Path(".taugate")


class Report(Section):
    dir: Path = Path(".taugate/reports")
    junit_strict: bool = True


class GateConfig(Section):
    """The resolved configuration. `host` is the selected profile; `gate` may be empty."""

    profile: Text = "embedded"
    host: HostProfile = HostProfile()
    target: Target = Target()
    completions: Completions = Completions()
    capture: Capture = Capture()
    drafters: Drafters = Drafters()
    gate: tuple[GateRule, ...] = ()
    replay: Replay = Replay()
    statistics: Statistics = Statistics()
    fidelity: Fidelity = Fidelity()
    numerics: Numerics = Numerics()
    window: WindowTimes = WindowTimes()
    store: Store = Store()
    report: Report = Report()


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in GateConfig.model_fields.items()
    if name not in ("profile", "gate")
}
"""The tables whose keys are addressed as `section.key`."""
