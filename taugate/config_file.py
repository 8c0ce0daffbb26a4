"""Reading gate.toml: dotted keys and raw values, with the line of each key for the error messages."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from taugate.config_schema import SECTIONS, BudgetRule, Capture, GateRule, HostProfile
from taugate.errors import ConfigError

_ARRAY = re.compile(r"\s*\[\[\s*([^\[\]]+?)\s*\]\]")
_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_KEY = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")


class ConfigFile:
    """One gate.toml, or none at all. Raises ConfigError, one sentence with the line, for unknown keys.

    `keys` are the raw values by dotted key (`default_profile` under `profile`); `profiles` the [profile.NAME]
    tables, `captures` their [profile.NAME.capture]; `gates` the number of [[gate]] tables.
    """

    def __init__(self, path: Path | None, cwd: Path) -> None:
        text = path.read_text(encoding="utf-8") if path else ""
        below = path is not None and path.is_relative_to(cwd)
        self.name = "gate.toml" if path is None else str(path.relative_to(cwd) if below else path)
        self._lines = key_lines(text)
        try:
            self._toml = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{self.name} is not valid TOML: {error}") from None
        self.keys: dict[str, Any] = {}
        self.profiles: dict[str, dict[str, Any]] = {}
        self.captures: dict[str, dict[str, Any]] = {}
        self.gates = 0
        for section, content in self._toml.items():
            self._read_section(section, content)

    def place(self, key: str) -> str:
        """The file and, if known, the line of a key or of its nearest parent."""
        while key and key not in self._lines:
            key = key.rpartition(".")[0]
        return f"{self.name} line {self._lines[key]}" if key else self.name

    def _read_section(self, section: str, content: Any) -> None:
        if section == "default_profile":
            self.keys["profile"] = content
        elif section == "profile":
            if not isinstance(content, dict):
                self._fail(
                    "profile", f'[profile.NAME] is a table; select with default_profile = "{content}"'
                )
            for name, table in content.items():
                own = dict(table) if isinstance(table, dict) else table
                capture = own.pop("capture", {}) if isinstance(own, dict) else {}
                for where, part, model in ((f"profile.{name}", own, HostProfile),
                                           (f"profile.{name}.capture", capture, Capture)):  # fmt: skip
                    self._check_table(where, part, model)
                    self._check_values(where, part, model)
                self.profiles[name], self.captures[name] = own, capture
        elif section == "gate":
            if not isinstance(content, list):
                self._fail("gate", "each gate is its own [[gate]] table, with double brackets")
            for index, table in enumerate(content):
                self._check_table(f"gate.{index}", table, GateRule)
                self.keys |= {f"gate.{index}.{key}": value for key, value in table.items()}
            self.gates = len(content)
        elif section in SECTIONS:
            self._check_table(section, content, SECTIONS[section])
            if section == "numerics":
                self._check_budgets(content.get("budget", {}))
            self.keys |= {f"{section}.{key}": value for key, value in content.items()}
        else:
            known = [*SECTIONS, "default_profile", "profile", "gate"]
            self._fail(section, f"unknown key {section}{closest(section, known)}")

    def _check_table(self, where: str, table: Any, model: type[BaseModel]) -> None:
        if not isinstance(table, dict):
            self._fail(where, f"{where} is a table, not a value")
        for key in table:
            if key not in model.model_fields:
                known = [f"{where}.{name}" for name in model.model_fields]
                self._fail(f"{where}.{key}", f"unknown key {where}.{key}{closest(f'{where}.{key}', known)}")

    def _check_budgets(self, budgets: Any) -> None:
        if not isinstance(budgets, dict):
            self._fail("numerics.budget", "each budget is its own [numerics.budget.NAME] table")
        for name, table in budgets.items():
            self._check_table(f"numerics.budget.{name}", table, BudgetRule)
            self._check_values(f"numerics.budget.{name}", table, BudgetRule)

    def _check_values(self, where: str, table: dict[str, Any], model: type[BaseModel]) -> None:
        """Values of every profile: a mistake in one that is not in use shows before the day it is needed."""
        try:
            model.model_validate(table)
        except ValidationError as error:
            for detail in sorted(error.errors(), key=lambda detail: detail["type"] == "missing"):
                if detail["loc"]:  # without one it is about completeness, which overrides may still provide
                    key = ".".join([where, *map(str, detail["loc"])])
                    given = "" if detail["type"] == "missing" else f" = {detail['input']!r}"
                    self._fail(key, f"{key}{given}: {reason(detail)}")

    def _fail(self, key: str, what: str) -> NoReturn:
        raise ConfigError(f"{self.place(key)}: {what}")


def key_lines(text: str) -> dict[str, int]:
    """Line numbers (from 1) of tables and keys by dotted name; array tables as `gate.0`.

    The standard library's parser does not say. Keys inside inline tables are not listed; their parent is.
    """
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _ARRAY.match(line):
            name = _plain(match[1])
            section = f"{name}.{counts.get(name, 0)}"
            counts[name] = counts.get(name, 0) + 1
            lines.setdefault(name, number)
            lines.setdefault(section, number)
        elif match := _TABLE.match(line):
            section = _plain(match[1])
            lines.setdefault(section, number)
        elif match := _KEY.match(line):
            key = _plain(match[1])
            lines.setdefault(f"{section}.{key}" if section else key, number)
    return lines


def _plain(dotted: str) -> str:
    return re.sub(r"\s*\.\s*", ".", dotted).replace('"', "").replace("'", "")


def reason(detail: Any) -> str:
    """What is wrong with a value, out of a pydantic error."""
    if detail["type"] == "string_pattern_mismatch":
        return 'should be "chain", "ddtree-N" or "topk-K"'  # the only pattern of the schema
    if detail["type"] in ("path_type", "tuple_type"):
        return "should be a path" if detail["type"] == "path_type" else "should be a list"
    return str(detail["msg"]).removeprefix("Value error, ").removeprefix("Input ").strip()


def closest(key: str, known: Iterable[str]) -> str:
    """ "; did you mean …?" for the nearest known key, or nothing."""
    match = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else ""
