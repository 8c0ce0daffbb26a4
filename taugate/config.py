"""Resolving the configuration: command line, then TAUGATE_* variables, then gate.toml, then the default.

Each value knows which of them it came from. `default_profile` (--profile, TAUGATE_PROFILE) selects a table
[profile.NAME]; its keys are addressed as `host.*` everywhere else, so that `--set host.service=…` and
TAUGATE_HOST_SERVICE mean the same whichever profile is in use. A table [profile.NAME.capture] takes the place of the
same keys of [capture]: what a GPU host can do is not what the embedded one can.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from taugate.config_file import ConfigFile, closest, reason
from taugate.config_schema import PROFILE_DEFAULTS, SECTIONS, GateConfig, GateRule
from taugate.errors import ConfigError

CLI, ENVIRONMENT, FILE, DEFAULT = "command line", "environment", "gate.toml", "default"
PREFIX = "TAUGATE_"
_Layer = dict[str, tuple[Any, str]]  # dotted key -> raw value and source


@dataclass(frozen=True)
class Resolved:
    """The configuration and where each value came from.

    `value` is the tree (`value.host`, `value.completions`, …), durations in seconds, local paths absolute;
    `shown` holds the values as they were written.
    """

    value: GateConfig
    file: Path | None
    sources: Mapping[str, str]
    shown: Mapping[str, str]
    changed: frozenset[str]

    def source(self, key: str) -> str:
        """Where the value of a dotted key came from. Raises ConfigError for a key that does not exist."""
        known = known_keys(len(self.value.gate))
        if key not in known:
            raise ConfigError(f"{key} is not a key of the configuration{closest(key, known)}")
        return self.sources.get(key, DEFAULT)

    def describe(self) -> list[str]:
        """Header lines: profile, candidate, and every value that is not the default, each with its source."""
        always = {"profile": self.value.profile, "drafters.candidate": "none"}
        return [
            f"{key}={self.shown.get(key, always.get(key))} ({self.source(key)})"
            for key in known_keys(len(self.value.gate))
            if key in always or key in self.changed
        ]


def resolve(
    root: Path,
    cli: Mapping[str, str | list[str]],
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    cwd: Path | None = None,
) -> Resolved:
    """Resolve `root`/gate.toml (or `file`) against the command line and the environment.

    Relative paths of the file and of defaults belong to the file's directory (`root` without a file), those
    of the command line and the environment to `cwd`. Raises ConfigError, one sentence, for anything unknown
    or unusable.
    """
    cwd = cwd or Path.cwd()
    if file is not None and not file.is_file():
        raise ConfigError(f"there is no configuration file {file}; --gate-config takes the path of one")
    path = file or root / "gate.toml"
    path = path.absolute() if path.is_file() else None
    toml = ConfigFile(path, cwd)
    overrides = _overrides(cli, environ, toml.gates)
    given: _Layer = {key: (value, FILE) for key, value in toml.keys.items()}
    profile = str((overrides.get("profile") or given.get("profile") or ("embedded", DEFAULT))[0])
    given |= _profile_layer(profile, toml, overrides) | overrides
    config = _validated(given, profile, toml)
    sources = {key: source for key, (_, source) in given.items()}
    return Resolved(
        value=_absolute(config, "", sources, cwd, path.parent if path else root.absolute()),
        file=path,
        sources=sources,
        shown={key: _show(value) for key, (value, _) in given.items()},
        changed=_changed(config, sources),
    )


def known_keys(gates: int) -> list[str]:
    """Every dotted key, in the order of the schema, for a file with that many [[gate]] tables."""
    keys = [f"{name}.{field}" for name, model in SECTIONS.items() for field in model.model_fields]
    rules = [f"gate.{index}.{field}" for index in range(gates) for field in GateRule.model_fields]
    return ["profile", *keys, *rules]


def _overrides(cli: Mapping[str, str | list[str]], environ: Mapping[str, str], gates: int) -> _Layer:
    known = known_keys(gates)
    by_variable = {PREFIX + key.upper().replace(".", "_"): key for key in known}
    layer: _Layer = {}
    for name, text in environ.items():
        if name.startswith(PREFIX):
            if name not in by_variable:
                hint = closest(name, by_variable)
                raise ConfigError(f"the environment variable {name} names no key of the configuration{hint}")
            if text:  # CI systems define variables that they leave empty
                layer[by_variable[name]] = (_from_text(by_variable[name], text), ENVIRONMENT)
    for key, value in cli.items():
        if key not in known:
            hint = closest(key, known)
            raise ConfigError(f"{key} on the command line is no key of the configuration{hint}")
        layer[key] = (_from_text(key, value) if isinstance(value, str) else value, CLI)
    return layer


def _profile_layer(profile: str, toml: ConfigFile, overrides: _Layer) -> _Layer:
    if profile not in toml.profiles and profile != "embedded":
        names = ", ".join(sorted({"embedded", *toml.profiles}))
        raise ConfigError(f"there is no profile {profile!r} in {toml.name}; it has {names}")
    table = toml.profiles.get(profile, {})
    # A forgotten `kind` must not turn a real host into the embedded one: the gate would be green elsewhere.
    layer: _Layer = {"host.kind": ("embedded" if profile == "embedded" else "ssh", DEFAULT)}
    layer |= {f"host.{key}": (value, FILE) for key, value in table.items()}
    layer |= {f"capture.{key}": (value, FILE) for key, value in toml.captures.get(profile, {}).items()}
    kind = str(overrides.get("host.kind", layer["host.kind"])[0])
    return {f"host.{key}": (value, DEFAULT) for key, value in PROFILE_DEFAULTS.get(kind, {}).items()} | layer


def _validated(given: _Layer, profile: str, toml: ConfigFile) -> GateConfig:
    raw: dict[str, Any] = {"profile": profile}
    rules: list[dict[str, Any]] = [{} for _ in range(toml.gates)]
    for key, (value, _) in given.items():
        section, _, name = key.partition(".")
        if section == "gate":
            index, _, name = name.partition(".")
            rules[int(index)][name] = value
        elif name:
            raw.setdefault(section, {})[name] = value
    try:
        return GateConfig.model_validate(raw | {"gate": rules})
    except ValidationError as error:
        raise _sentence(error.errors()[0], given, profile, toml) from None


def _sentence(detail: Any, given: _Layer, profile: str, toml: ConfigFile) -> ConfigError:
    """One pydantic error as one sentence that names the key and the place where the value was written."""
    loc = [str(part) for part in detail["loc"]]
    depth = 3 if loc[0] == "gate" else 2  # what pydantic adds beyond are list indices and union members
    key = ".".join(loc[:depth])
    value, source = given.get(key, (None, FILE))
    named = f"profile.{profile}{key[4:]}" if key.startswith("host") and source == FILE else key
    what = f"{named} = {value!r}: {reason(detail)}" if key in given else f"{named}: {reason(detail)}"
    if source == ENVIRONMENT:
        return ConfigError(f"{PREFIX}{key.upper().replace('.', '_')} in the environment, {what}")
    return ConfigError(f"on the command line, {what}" if source == CLI else f"{toml.place(named)}: {what}")


def _from_text(key: str, text: str) -> Any:
    """Text of an option or a variable as a raw value: "none" is None, commas separate the parts of a list."""
    section, _, name = key.partition(".")
    listed = section in SECTIONS and isinstance(SECTIONS[section].model_fields[name].default, tuple)
    if text.strip().lower() == "none":
        return [] if listed else None
    return [part.strip() for part in text.split(",") if part.strip()] if listed else text


def _absolute(section: Any, prefix: str, sources: Mapping[str, str], cwd: Path, base: Path) -> Any:
    """The same section with `~` expanded and every local path absolute."""
    changed: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        origin = cwd if sources.get(f"{prefix}{name}") in (CLI, ENVIRONMENT) else base
        if isinstance(value, BaseModel):
            changed[name] = _absolute(value, f"{prefix}{name}.", sources, cwd, base)
        elif isinstance(value, Path):
            changed[name] = _absolute_path(value, origin)
        elif isinstance(value, tuple) and value and isinstance(value[0], Path):
            changed[name] = tuple(_absolute_path(part, origin) for part in value)
    return section.model_copy(update=changed)


def _absolute_path(path: Path, base: Path) -> Path:
    return Path(os.path.normpath(base.absolute() / os.path.expanduser(path)))


def _changed(config: GateConfig, sources: Mapping[str, str]) -> frozenset[str]:
    """Keys set from outside the file, and keys of the file whose value is not the default."""
    changed = {key for key, source in sources.items() if source in (CLI, ENVIRONMENT)}
    for name in SECTIONS:
        section = getattr(config, name)
        fields = type(section).model_fields
        in_file = {key for key in fields if sources.get(f"{name}.{key}") == FILE}
        changed |= {f"{name}.{key}" for key in in_file if getattr(section, key) != fields[key].default}
    for index, rule in enumerate(config.gate):
        changed |= {f"gate.{index}.{key}" for key, value in rule if value is not None}
    return frozenset(changed)


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return f"{len(value)} entries"
    return ", ".join(map(str, value)) or "none" if isinstance(value, (list, tuple)) else str(value)
