"""gate.toml: which source wins, where paths point, and the one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from taugate.config import resolve
from taugate.config_file import key_lines
from taugate.config_schema import SECTIONS, GateRule, parse_duration
from taugate.errors import ConfigError

PROJECT = Path(__file__).parents[1]
BOX = """
default_profile = "box"
[profile.box]
kind = "ssh"
host = "gpu-box"
user = "root"
service = "sglang.service"
remote_python = "/opt/eval/bin/python"
[completions]
prompts = "data/prompts.jsonl"
limit = 64
[[gate]]
min_tau = 4.5
[[gate]]
verifier = "ddtree-8"
min_tau = 5.5
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "gate.toml").write_text(BOX)
    return tmp_path


def test_command_line_beats_environment_beats_file_beats_default(root):
    environ = {"TAUGATE_COMPLETIONS_LIMIT": "48", "TAUGATE_STATISTICS_SEED": "7"}
    resolved = resolve(root, {"completions.limit": "32"}, environ)
    assert resolved.value.completions.limit == 32
    assert resolved.source("completions.limit") == "command line"
    assert (resolved.value.statistics.seed, resolved.source("statistics.seed")) == (7, "environment")
    assert (resolved.value.host.service, resolved.source("host.service")) == ("sglang.service", "gate.toml")
    assert (resolved.value.statistics.draws, resolved.source("statistics.draws")) == (2000, "default")


def test_profile_is_selected_by_each_source(root):
    assert resolve(root, {}, {}).value.host.host == "gpu-box"
    assert resolve(root, {}, {"TAUGATE_PROFILE": "embedded"}).value.host.kind == "embedded"
    assert resolve(root, {"profile": "box"}, {"TAUGATE_PROFILE": "embedded"}).value.host.kind == "ssh"


def test_a_real_host_gets_its_defaults_and_the_embedded_one_gets_none(root):
    box, embedded = resolve(root, {}, {}), resolve(root, {"profile": "embedded"}, {})
    assert (box.value.host.ssh_port, box.value.host.port) == (None, 30000), "what SSH needs is as ~/.ssh/config says"
    assert (box.value.host.known_hosts, box.value.host.host_key_fingerprint) == (None, ())
    assert box.source("host.port") == "default"
    assert (embedded.value.host.ssh_port, embedded.value.host.service) == (None, None)


def test_a_profile_has_its_own_capture_and_others_do_not(root):
    text = BOX + '[capture]\ndtype = "float32"\n[profile.box.capture]\nkernel_path = "fla"\ndtype = "bfloat16"\n'
    (root / "gate.toml").write_text(text)
    box, embedded = resolve(root, {}, {}), resolve(root, {"profile": "embedded"}, {})
    assert (box.value.capture.kernel_path, box.value.capture.dtype) == ("fla", "bfloat16")
    assert (embedded.value.capture.kernel_path, embedded.value.capture.dtype) == ("torch", "float32")
    assert box.source("capture.kernel_path") == "gate.toml" and "capture.kernel_path=fla (gate.toml)" in box.describe()
    assert resolve(root, {"capture.kernel_path": "torch"}, {}).value.capture.kernel_path == "torch"


def test_a_profile_without_kind_is_never_the_embedded_host(tmp_path):
    (tmp_path / "gate.toml").write_text('[profile.box]\nservice = "a.service"\n')
    with pytest.raises(ConfigError, match='kind "ssh" also needs host, remote_python'):
        resolve(tmp_path, {"profile": "box"}, {})


def test_an_incomplete_profile_can_be_completed_from_outside(tmp_path):
    (tmp_path / "gate.toml").write_text(
        '[profile.box]\nuser = "u"\nservice = "a.service"\nremote_python = "/p"\n'
    )
    assert resolve(tmp_path, {"profile": "box"}, {"TAUGATE_HOST_HOST": "h"}).value.host.host == "h"


def test_relative_paths_belong_to_where_they_were_written(root, tmp_path_factory, monkeypatch):
    cwd = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("HOME", "/home/somebody")
    cli = {"drafters.candidate": ["ckpt/a", "~/b"], "drafters.reference": "/abs"}
    value = resolve(root, cli, {"TAUGATE_STORE_PATH": "../cache"}, cwd=cwd).value
    assert value.completions.prompts == root / "data/prompts.jsonl"
    assert value.drafters.candidate == (cwd / "ckpt/a", Path("/home/somebody/b"))
    assert value.drafters.reference == Path("/abs")
    assert value.store.path == cwd.parent / "cache"
    assert value.report.dir == root / ".taugate/reports"


def test_rules_are_addressed_by_index(root):
    resolved = resolve(root, {"gate.1.min_tau": "6"}, {"TAUGATE_GATE_0_MIN_TAU": "4"})
    assert [rule.min_tau for rule in resolved.value.gate] == [4, 6]
    assert [rule.verifier for rule in resolved.value.gate] == ["chain", "ddtree-8"]


def test_none_and_empty_and_lists_from_text(root):
    resolved = resolve(
        root, {"completions.limit": "none", "profile": "embedded", "host.fault": "slow-start, memory-stays"},
        {"TAUGATE_STATISTICS_SEED": ""},
    )  # fmt: skip
    assert resolved.value.completions.limit is None
    assert resolved.value.host.fault == ("slow-start", "memory-stays")
    assert resolved.source("statistics.seed") == "default"


def test_describe_lists_what_is_not_the_default_with_its_source(root):
    lines = resolve(root, {"completions.limit": "32"}, {"TAUGATE_HOST_SERVICE": "x.service"}).describe()
    assert lines[0] == "profile=box (gate.toml)"
    assert "host.service=x.service (environment)" in lines
    assert "completions.limit=32 (command line)" in lines
    assert "drafters.candidate=none (default)" in lines
    assert not [line for line in lines if line.startswith("statistics")]


MISTAKES = {
    "unknown key": (
        '[capture]\nkernal_path = "fla"',
        "line 2: unknown key capture.kernal_path; did you mean capture.kernel_path?",
    ),
    "unknown table": ("[captur]\nx = 1", "line 1: unknown key captur; did you mean capture?"),
    "inline table": ('capture = { kernal_path = "fla" }', "line 1: unknown key capture.kernal_path"),
    "unused profile": (
        '[profile.box]\n\nservce = "x"',
        "line 3: unknown key profile.box.servce; did you mean profile.box.service?",
    ),
    "value of unused profile": ("[profile.box]\nssh_port = 0", "line 2: profile.box.ssh_port = 0: "),
    "unknown key of a profile's capture": (
        '[profile.box.capture]\nkernel = "fla"',
        "line 2: unknown key profile.box.capture.kernel; did you mean profile.box.capture.kernel_path?",
    ),
    "value of a profile's capture": (
        '[profile.box.capture]\nkernel_path = "cuda"',
        "line 2: profile.box.capture.kernel_path = 'cuda': ",
    ),
    "capture of a profile as text": ('[profile.box]\ncapture = "fla"', "profile.box.capture is a table, not a value"),
    "profile as text": ('profile = "box"', 'select with default_profile = "box"'),
    "no such profile": ('default_profile = "bx"', "there is no profile 'bx'"),
    "duration without unit": (
        "[window]\nttl = 600",
        "line 2: window.ttl = 600: write a duration with its unit",
    ),
    "device that is none": ('[capture]\ndevice = "tpu"', "line 2: capture.device = 'tpu': "),
    "memory without unit": (
        "[capture]\nmax_gpu_memory = 6000",
        'line 2: capture.max_gpu_memory = 6000: write "auto" or a size with its unit',
    ),
    "webhook that is no address": ('[window]\nwebhook = "me@x"', "line 2: window.webhook = 'me@x': "),
    "second rule": (
        '[[gate]]\nmin_tau = 3\n[[gate]]\nverifier = "tree"\nmin_tau = 3',
        "line 4: gate.1.verifier = 'tree': ",
    ),
    "rule without threshold": (
        '[[gate]]\nverifier = "chain"',
        "gate.0: needs min_tau, max_loss_to_reference or both",
    ),
    "budget without a reason": (
        "[numerics.budget.x]\nlimits = { output = 2 }",
        "line 1: numerics.budget.x.level: Field required",
    ),
    "budget with a bad limit": (
        '[numerics.budget.x]\nlevel = "core"\nlimits = { output = -1 }',
        "line 3: numerics.budget.x.limits.output = -1: ",
    ),
    "unknown key of a budget": ("[numerics.budget.x]\nlimit = 2", "unknown key numerics.budget.x.limit; did you"),
    "replay on the host": ('[replay]\nwhere = "host"', "line 2: replay.where = 'host': drafters cannot be replayed on"),
    "empty rule": ("[[gate]]", "line 1: gate.0: needs min_tau"),
    "one bracket": ("[gate]\nmin_tau = 3", "double brackets"),
    "true as a number": ("[completions]\nlimit = true", "must be a number"),
    "NaN": ("[[gate]]\nmin_tau = nan", "line 2: gate.0.min_tau = nan: "),
    "not TOML": ("limit = ", "is not valid TOML"),
}


@pytest.mark.parametrize(("text", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_each_mistake_in_the_file_is_one_sentence_with_its_place(tmp_path, text, expected):
    (tmp_path / "gate.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path, {}, {})
    assert expected in str(caught.value)
    assert "gate.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cli", "environ", "expected"),
    [
        ({"completions.limt": "3"}, {}, "did you mean completions.limit?"),
        ({"completions.limit": "x"}, {}, "on the command line, completions.limit = 'x': "),
        ({"gate.2.min_tau": "3"}, {}, "did you mean gate."),
        ({}, {"TAUGATE_HOST_SERVCE": "x"}, "did you mean TAUGATE_HOST_SERVICE?"),
        ({}, {"TAUGATE_COMPLETIONS_LIMIT": "0"}, "TAUGATE_COMPLETIONS_LIMIT in the environment"),
        ({"profile": "embedded"}, {"TAUGATE_HOST_KIND": "local"}, 'kind "local" also needs service'),
    ],
)
def test_each_mistake_outside_the_file_is_one_sentence(root, cli, environ, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(root, cli, environ)
    assert expected in str(caught.value)


def test_a_named_file_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="there is no configuration file"):
        resolve(tmp_path, {}, {}, file=tmp_path / "other.toml")


def test_without_a_file_everything_is_default(tmp_path):
    resolved = resolve(tmp_path, {}, {})
    assert resolved.file is None
    assert resolved.value.host.kind == "embedded"
    assert resolved.describe() == ["profile=embedded (default)", "drafters.candidate=none (default)"]


def test_source_of_an_unknown_key_is_an_error(root):
    with pytest.raises(ConfigError, match=r"did you mean completions\.limit"):
        resolve(root, {}, {}).source("completions.limits")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1h30m", 5400), ("0.5s", 0.5)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", True, "m", "10 minutes", "-5s"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="with its unit"):
        parse_duration(text)


def test_lines_of_tables_keys_and_array_tables():
    lines = key_lines('a = 1\n[x.y]\n"b" = 2 # b = 3\n\n[[gate]]\nm = 1\n[[gate]]\nm = 2\n')
    assert (lines["a"], lines["x.y.b"]) == (1, 3)
    assert (lines["gate.0.m"], lines["gate.1.m"]) == (6, 8)


def test_the_shipped_file_resolves_and_names_every_key_of_the_schema():
    config = resolve(PROJECT, {}, {}).value
    assert config.profile == "embedded"
    assert config.gate
    assert resolve(PROJECT, {"profile": "box"}, {}).value.host.kind == "ssh"
    text = (PROJECT / "gate.toml").read_text()
    internal = {"fault", "attach"}  # of the embedded host, for tests
    for name, model in SECTIONS.items() | {("gate", GateRule)}:
        for key in model.model_fields:
            assert f"{key} = " in text or key in internal, f"gate.toml does not document {name}.{key}"
