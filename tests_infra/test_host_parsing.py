"""What the host prints is read strictly: systemd, nvidia-smi, SGLang. No host is needed here."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taugate.errors import DeadlineError, HostError, PreflightError
from taugate.host.fingerprint import differences
from taugate.host.gpus import ComputeApp, Gpu, GpuSnapshot, parse_apps, parse_gpus
from taugate.host.host import Host, HostSettings, connect
from taugate.host.job import run_job
from taugate.host.lease import Lease
from taugate.host.preflight import Check, Downtime, preflight, require
from taugate.host.record import Phase, PhaseEvent, WindowRecord, compare_canary
from taugate.host.release import Before
from taugate.host.sglang import Generation, SGLangClient
from taugate.host.transport import Completed, OutputCollector
from taugate.host.tunnel import Reply
from taugate.host.unit import Unit, UnitState, parse_span, valid_unit_name

GPUS = """0, GPU-aaaa, NVIDIA RTX A6000, 47004, 49140, [N/A]
1, GPU-bbbb, NVIDIA RTX A6000, 4, 49140, Disabled
"""


class Script:
    """A transport that answers from a table: the first key that the command line starts with wins."""

    name = "box"

    def __init__(self, answers=None):
        self.answers = answers or {}
        self.seen = []

    def run(self, argv, *, deadline, input=None, on_line=None):
        line = " ".join(argv)
        self.seen.append(list(argv))
        for start, answer in self.answers.items():
            if line.startswith(start):
                rc, stdout, stderr = answer if isinstance(answer, tuple) else (0, answer, "")
                return Completed(tuple(argv), rc, stdout, stderr, 0.0, self.name)
        return Completed(tuple(argv), 0, "", "", 0.0, self.name)

    def open_tcp(self, port, timeout):
        raise ConnectionRefusedError

    def close(self):
        pass


def test_gpu_lines():
    assert parse_gpus(GPUS) == (
        Gpu(0, "GPU-aaaa", "NVIDIA RTX A6000", 47004, 49140, "[N/A]"),
        Gpu(1, "GPU-bbbb", "NVIDIA RTX A6000", 4, 49140, "Disabled"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no GPU"),
        ("No devices were found\n", "unexpected GPU line: 'No devices were found'"),
        ("0, GPU-a, A, [N/A], 10, [N/A]", "does not know the memory of GPU 0"),
        ("0, GPU-a, A, [Not Supported], [Not Supported], [N/A]", "does not know the memory"),
        ("0, GPU-a, A, 1 MiB, 10, [N/A]", "unexpected GPU line"),
        ("0, 00000000:01:00.0, A, 1, 10, [N/A]", "unexpected GPU line"),
        ("0, GPU-a, A, 1, 10, Disabled\n0, GPU-a, A, 1, 10, Disabled", "lists a GPU twice"),
    ],
)
def test_unexpected_gpu_lines_are_errors(text, message):
    with pytest.raises(HostError, match=message):
        parse_gpus(text)


def test_process_lines():
    assert parse_apps("") == parse_apps("\n") == ()
    text = "12, GPU-a, 46990, sglang::scheduler_TP0\n13, GPU-a, [N/A], python -c a, b\n"
    assert parse_apps(text) == (
        ComputeApp(12, "GPU-a", 46990, "sglang::scheduler_TP0"),
        ComputeApp(13, "GPU-a", None, "python -c a, b"),
    )
    for bad in ("Failed to initialize NVML", "x, GPU-a, 1, y", "1, GPU-a, much, y", "1, 0, 5, y"):
        with pytest.raises(HostError, match="unexpected process line"):
            parse_apps(bad)


@given(st.text())
def test_garbage_never_looks_like_a_free_gpu(text):
    try:
        gpus = parse_gpus(text)
    except HostError:
        return
    assert gpus and all(gpu.uuid.startswith(("GPU-", "MIG-")) for gpu in gpus)


def test_time_spans():
    assert parse_span("1min 30s") == 90 and parse_span("500ms") == 0.5 and parse_span("0") == 0
    assert parse_span("infinity") == math.inf and parse_span("1h 2min") == 3720
    for bad in ("", "soon", "5 parsecs", "1min and"):
        with pytest.raises(HostError, match="not a systemd time span"):
            parse_span(bad)


def test_unit_names():
    for good in ("sglang.service", "a-b@0:1.timer", r"dev-x\x2d.scope"):
        assert valid_unit_name(good) == good
    for bad in (
        "",
        "sglang",
        "-x.service",
        "a b.service",
        "a;b.service",
        "a.service\n",
        "a.socket",
        "$(x).service",
    ):
        with pytest.raises(HostError, match="not a unit name"):
            valid_unit_name(bad)
    with pytest.raises(HostError, match="names no host"):
        connect(HostSettings("a.service"))


SHOW = """TimeoutStopUSec=1min 30s
LoadState=loaded
ActiveState=active
SubState=running
MainPID=42
ControlGroup=/system.slice/a.service
Result=success
KillMode=control-group
Restart=always
NRestarts=1
UnitFileState=enabled
InvocationID=abc
"""


def test_unit_state_is_read_by_key():
    state = Unit(Script({"systemctl show": SHOW}), "a.service").show()
    assert (state.load, state.active, state.main_pid, state.timeout_stop_s) == ("loaded", "active", 42, 90)
    assert not state.stopped and state.kill_mode == "control-group"
    with pytest.raises(HostError, match="does not tell the state"):
        Unit(Script({"systemctl show": "MainPID=0\n"}), "a.service").show()
    with pytest.raises(HostError, match="bus is down"):
        Unit(Script({"systemctl show": (1, "", "bus is down")}), "a.service").show()


def test_the_last_start_is_read_from_the_journal_or_unknown():
    line = '{"__MONOTONIC_TIMESTAMP":"95500000","MESSAGE":"The server is fired up and ready to roll!"}\n'
    shown = {"systemctl show": "ActiveEnterTimestampMonotonic=40000000\n"}
    assert Unit(Script({"journalctl": line} | shown), "a.service").last_start_s() == 55.5
    earlier = line.replace("95500000", "30000000")
    for answer in ("", (127, "", "journalctl: not found"), "-- no entries --", "{}", "[]", earlier):
        assert Unit(Script({"journalctl": answer} | shown), "a.service").last_start_s() is None


def test_unit_pids_never_hold_zero_or_one():
    unit = Unit(Script({"find": "0\n1\n7\n8\n"}), "a.service", "/cg/")
    assert unit.pids("/system.slice/a.service") == {7, 8}
    assert unit.pids("") == frozenset()
    gone = Unit(Script({"find": (1, "", "find: '/cg/x': No such file or directory")}), "a.service")
    assert gone.pids("/x") == frozenset()
    for bad in ("/", "relative", "/a/../.."):
        with pytest.raises(HostError, match="unusable control group"):
            unit.pids(bad)


def test_what_becomes_a_word_of_a_command_is_checked_first():
    with pytest.raises(HostError, match="not a unit name"):
        Lease(Script(), window_id="w1").arm(600, "x; rm -rf /.service", 1)
    with pytest.raises(HostError, match="not a window id"):
        Lease(Script(), window_id="a b")
    assert Lease(Script(), window_id="w", owner="me $(x) @here").owner == "me___x__@here"
    with pytest.raises(HostError, match="not the name of an environment variable"):
        run_job(
            Script(), ["x"], window_id="w", number=1, service="a.service", work_dir="/", deadline_s=1,
            env={"A=B": ""},
        )  # fmt: skip


def test_a_helper_that_does_not_answer_is_named_without_its_text():
    class Slow(Script):
        def run(self, argv, **options):
            raise DeadlineError(f"{argv} did not end")

    with pytest.raises(DeadlineError, match="^`taugate-host renew w1` on box did not end within 20 s; it may"):
        Lease(Slow(), window_id="w1").renew()
    with pytest.raises(HostError, match="^renew of window w1 failed.*`taugate-host` ended with exit status 1"):
        Lease(Script({"env": (1, "", "")}), window_id="w1").renew()


@given(st.lists(st.binary(max_size=12), max_size=12))
def test_lines_do_not_depend_on_how_output_is_cut(pieces):
    whole = b"".join(pieces)
    lines = []
    cut = OutputCollector(lines.append)
    for piece in pieces:
        cut.stdout(piece)
    text, _ = cut.finish()
    assert text == whole.decode("utf-8", "replace")
    expected = text.split("\n")
    assert lines == [line.removesuffix("\r") for line in expected[:-1]] + ([expected[-1]] if expected[-1] else [])


def test_levels_at_which_a_gpu_counts_as_free():
    gpus = (Gpu(0, "GPU-a", "x", 47000, 49140, "[N/A]"), Gpu(1, "GPU-b", "x", 49000, 49140, "[N/A]"))
    state = UnitState("loaded", "active", "running", 7, "/a", "success", "mixed", 90, "no", 0, "enabled", "i")
    on_a = GpuSnapshot(gpus, (ComputeApp(7, "GPU-a", 44000, "s"), ComputeApp(9, "GPU-b", 5, "other")))
    assert Before(state, frozenset({7}), {}, on_a).limits_mib() == {"GPU-a": 3000}
    untold = GpuSnapshot(gpus, (ComputeApp(7, "GPU-a", None, "s"),))
    assert Before(state, frozenset({7}), {}, untold).limits_mib() == {"GPU-a": 1474}
    assert Before(state, frozenset({7}), {}, GpuSnapshot(gpus, ())).limits_mib() == {
        "GPU-a": 1474,
        "GPU-b": 1474,
    }


def client(answers):
    made = SGLangClient(Script(), 30000)
    asked = []

    def get(path, deadline=0.0):
        asked.append(path)
        return answers.get(path, Reply(404, None))

    made.get_json = get
    made.post_json = lambda path, body, deadline=0.0: answers[path]
    return made, asked


def test_identity_from_new_and_old_names():
    new = {
        "/v1/models": Reply(200, {"data": [{"id": "m"}]}),
        "/model_info": Reply(200, {"model_path": "/m"}),
        "/server_info": Reply(200, {"launch_command": ["python", "-m", "x y"], "version": "0.5"}),
    }
    old = {
        path.replace("model_info", "get_model_info").replace("server_info", "get_server_info"): reply
        for path, reply in new.items()
    }
    one, two = (client(answers)[0].identity() for answers in (new, old))
    assert one == two and one.launch_command == "python -m 'x y'" and one.differs_from(two) == []
    new["/v1/models"] = Reply(200, {"data": [{"id": "n"}]})
    assert client(new)[0].identity().differs_from(one) == ["model_id was 'm' and is 'n'"]
    with pytest.raises(HostError, match="answered 503"):
        client({"/v1/models": Reply(503, None)})[0].identity()
    with pytest.raises(HostError, match="is it SGLang"):
        client(new | {"/v1/models": Reply(200, {"data": []})})[0].identity()


def test_readiness_uses_the_older_name_only_when_the_new_one_does_not_exist():
    assert client({"/health": Reply(200, None)})[0].ready()
    busy, asked = client({"/ready": Reply(503, None), "/health": Reply(200, None)})
    assert not busy.ready() and asked == ["/ready"]
    assert not client({"/ready": Reply(0, None)})[0].ready()


def test_what_a_fingerprint_takes_of_server_info_does_not_change_from_start_to_start():
    body = {
        "tp_size": 2, "mem_fraction_static": 0.88, "cuda_graph_config": {"bs": [1, 2]}, "max_total_num_tokens": 9,
        "random_seed": 77, "startup_time": {"load_weight": 1.5}, "internal_states": [{"last_gen_throughput": 3.0}],
        "nccl_port": 1234, "status": "ready", "launch_command": "x", "version": "0.5.23", "dist_init_addr": None,
    }  # fmt: skip
    assert client({"/server_info": Reply(200, body)})[0].arguments() == {
        "tp_size": "2", "mem_fraction_static": "0.88", "max_total_num_tokens": "9",
        "cuda_graph_config": '{"bs": [1, 2]}',
    }  # fmt: skip
    before, after = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "5", "d": "4"}
    told = ["b was 2 and is 5", "c was 3 and is absent", "d was absent and is 4"]
    assert differences(before, after) == told and differences(before, dict(before)) == []


def test_startup_time_and_loads():
    info = {"/server_info": Reply(200, {"startup_time": {"load_weight": 10.0, "cuda_graph": 5, "note": "x"}})}
    assert client(info)[0].startup_seconds() == 10
    assert client({"/server_info": Reply(200, {})})[0].startup_seconds() is None
    rank = {"num_running_reqs": 2, "num_waiting_reqs": 1}
    for body in ([rank, rank], {"loads": [rank, rank]}):
        loads = client({"/v1/loads": Reply(200, body)})[0].loads()
        assert (loads.running, loads.waiting) == (4, 2)
    assert client({})[0].loads() is None


def test_generation_is_parsed_and_refusals_are_sentences():
    meta = {
        "finish_reason": {"type": "stop", "matched": 9},
        "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1,
        "output_top_logprobs": [[[-0.1, 5, None], [-2.0, 6, None]], [[-0.2, 9, None], [-1.0, 5, None]]],
    }  # fmt: skip
    good, _ = client({"/generate": Reply(200, {"output_ids": [5, 9], "meta_info": meta})})
    assert good.generate([1, 2, 3], 4, top_logprobs=2) == Generation(
        (5, 9), "stop", 9, 3, 1, (((-0.1, 5), (-2.0, 6)), ((-0.2, 9), (-1.0, 5)))
    )
    cases = [
        (Reply(0, None), "is not listening"),
        (Reply(503, None), "answered 503"),
        (Reply(400, {"error": {"message": "too long"}}), r"answered 400 \(too long\)"),
        (Reply(200, {"text": "x"}), "without the expected fields"),
        (Reply(200, {"output_ids": [], "meta_info": meta | {"finish_reason": {"type": "abort"}}}), "'abort'"),
    ]
    for reply, message in cases:
        with pytest.raises(HostError, match=message) as caught:
            client({"/generate": reply})[0].generate([1], 4)
        assert "\n" not in str(caught.value)


def test_canary_difference_comes_with_its_margin():
    before = Generation((1, 2, 3), "length", None, 1, 0, (((-1.0, 1), (-3.0, 4)), ((-0.5, 2), (-0.75, 8)), ()))
    same = compare_canary(before, before)
    assert same["same"] and same["first_difference"] is None and same["top2_margin"] is None
    other = compare_canary(before, Generation((1, 8, 3), "length", None, 1, 0))
    assert (other["same"], other["first_difference"], other["top2_margin"]) == (False, 1, 0.25)
    shorter = compare_canary(before, Generation((1, 2), "stop", 2, 1, 0))
    assert (shorter["first_difference"], shorter["top2_margin"]) == (2, None)


def test_the_record_is_json():
    record = WindowRecord(
        "w", "box", "a.service", phases=[PhaseEvent(Phase.HELD, "2026-01-01T00:00:00+00:00", 1.0, "")]
    )
    assert json.loads(json.dumps(record.to_json()))["phases"][0]["phase"] == "held"


def test_preflight_tells_every_red_check_at_once():
    script = Script(
        {
            "systemctl --version": "systemd 245 (245.4)\n+PAM",
            "env": "lease=taugate window w2 bob@lab\nquarantine=restore: x\njob=taugate-job-w0-1.service\n",
            "systemctl show -p ExecStart": "ExecStart={ path=/usr/bin/docker ; argv[]=docker run x }\nNRestarts=3\n"
            "ActiveEnterTimestampMonotonic=90000000\n",
            "cat /proc/uptime": "100.0 5.0",
            "date": "17\n",
            "cat /proc/42": "0::/kubepods.slice/x\n",
            "systemctl show": SHOW.replace("UnitFileState=enabled", "UnitFileState=disabled").replace(
                "KillMode=control-group", "KillMode=none"
            ),
            "find": "42\n",
            "nvidia-smi --query-gpu": "0, GPU-a, A, 5, 49140, Enabled\n",
            "nvidia-smi --query-compute": "42, GPU-a, 1, server\n99, GPU-a, 1, someone else\n",
            "test -w": (1, "", ""),
        }
    )
    host = Host(HostSettings("a.service", expected_model_id="m"), script)

    def broken():
        raise HostError("no Python there")

    checks = preflight(
        host,
        downtime=Downtime(30, 600, 300, "assumed"),
        budget_s=600,
        extra=[lambda: Check("torch", True, "2.13"), broken],
    )
    red = {check.name for check in checks if not check.ok}
    assert red == {
        "systemd", "unit enabled", "server ready", "no MIG", "GPUs are the server's alone", "no other window",
        "work_dir", "downtime", "host", "not quarantined", "systemd runs the server",
        "no other manager", "not restarting", "clock", "stop ends the server",
    }  # fmt: skip
    with pytest.raises(PreflightError) as caught:
        require(checks)
    message = str(caught.value)
    assert "someone else (pid 99)" in message and "no Python there" in message and "bob@lab" in message
    assert "expected 930 s = stop 30 + job 600 + start 300 (assumed), budget 600 s" in message
    asked = [argv[argv.index("taugate-host") + 1] for argv in script.seen if "taugate-host" in argv]
    assert asked == ["status"]
    verbs = {argv[1] for argv in script.seen if argv[0] == "systemctl"}
    assert verbs == {"--version", "show"}
