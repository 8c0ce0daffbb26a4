"""Preflight's questions to the server, and waiting for another run: each finding with its reason and its remedy."""

from __future__ import annotations

import pytest

from taugate.errors import HostError, WindowError
from taugate.host.host import Host, HostSettings
from taugate.host.preflight import Downtime, preflight
from taugate.host.queue import wait_until_free
from taugate.host.record import WindowSettings
from taugate.host.transport import Completed
from taugate.host.tunnel import Reply

UNIT = "a.service"
SHOW = f"""LoadState=loaded
ActiveState=active
SubState=running
MainPID=42
ControlGroup=/system.slice/{UNIT}
Result=success
KillMode=mixed
TimeoutStopUSec=1min 30s
Restart=always
NRestarts=0
UnitFileState=enabled
InvocationID=i1
"""


class Box:
    """A transport whose commands and server answer as a healthy host does, but for what `changes` says.

    The first start of a command line that matches wins.
    """

    name = "box"

    def __init__(self, changes=None, load=(0, 0), launch="python -m sglang.launch_server", **info):
        self.load, self.launch = load, launch
        self.info = {"model_path": "/m", "weight_version": "default", "tokenizer_path": "/m"} | info
        healthy = {
            "systemctl --version": "systemd 252 (252.39)\n",
            "systemctl show -p ExecStart": "ExecStart={ path=/opt/py ; argv[]=/opt/py -m sglang }\nNRestarts=0\n"
            "ActiveEnterTimestampMonotonic=1000000\nTriggeredBy=\n",
            "systemctl show": SHOW,
            "cat /proc/uptime": "9000.0 5.0",
            "cat /proc/42/cgroup": f"0::/system.slice/{UNIT}\n",
            "date": "now\n",
            "find": "42\n",
            "nvidia-smi --query-gpu": "0, GPU-a, A, 47000, 49140, [N/A]\n",
            "nvidia-smi --query-compute": "42, GPU-a, 46990, sglang::scheduler\n",
            "pgrep": (1, ""),
            "env": "lease=\nrestoring=\nquarantine=\n",
            "df": "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/a 9 9 99999999 1% /\n",
        }
        changes = changes or {}
        self.answers = changes | {start: answer for start, answer in healthy.items() if start not in changes}
        self.seen = []

    def run(self, argv, *, deadline, input=None, on_line=None):
        line = " ".join(argv)
        self.seen.append(line)
        for start, answer in self.answers.items():
            if line.startswith(start):
                answer = answer(self) if callable(answer) else answer
                rc, out = answer if isinstance(answer, tuple) else (0, answer)
                return Completed(tuple(argv), rc, out, "", 0.0, self.name)
        return Completed(tuple(argv), 0, "", "", 0.0, self.name)


def checked(box, **window):
    host = Host(HostSettings(UNIT, host="box", user="root"), box)
    load = {"num_running_reqs": box.load[0], "num_waiting_reqs": box.load[1]}
    replies = {
        "/ready": Reply(200, None), "/v1/models": Reply(200, {"data": [{"id": "m"}]}),
        "/model_info": Reply(200, box.info),
        "/server_info": Reply(200, {"launch_command": box.launch, "version": "0.5.23"}),
        "/v1/loads": Reply(200, {"loads": [load]}),
    }  # fmt: skip
    host.server.get_json = lambda path, deadline=0.0: replies.get(path, Reply(404, None))
    settings = WindowSettings((1,), **window)
    return {c.name: c for c in preflight(host, downtime=Downtime(1, 1, 1, "t"), budget_s=60, window=settings)}


def test_a_healthy_host_has_no_finding():
    box = Box()
    checks = checked(box, stop_timeout_s=120)
    assert {check.word for check in checks.values()} == {"ok"}, [str(c) for c in checks.values() if c.word != "ok"]
    asked = [line for line in box.seen if not line.startswith("env ")]
    assert not any(word in line for line in asked for word in ("stop --", "kill", "start --", "restart "))


def test_a_server_whose_weights_were_replaced_in_memory_is_not_restarted():
    check = checked(Box(weight_version="step-400"))["weights are those on disk"]
    assert check.word == "RED" and "weight_version is step-400" in str(check) and "serve those on disk" in str(check)
    launch = "python -m sglang.launch_server --weight-version step-400"
    assert checked(Box(weight_version="step-400", launch=launch))["weights are those on disk"].ok


def test_memory_saver_is_a_warning_with_its_reason():
    check = checked(Box(launch="x --enable-memory-saver --tp 2"))["memory saver"]
    assert check.word == "WARN" and "releases and resumes this server's memory" in check.detail


@pytest.mark.parametrize(
    "box",
    [
        Box(launch="x --weight-cache-mode client --tp 2"),
        Box(launch="x --weight-cache-mode=client"),
        Box({"pgrep": "77 python -m sglang.srt.weight_cache.daemon --port 1\n"}),
        Box({"nvidia-smi --query-compute": "42, GPU-a, 1, sglang\n43, GPU-a, 1, sglang::weight_cache\n"}),
    ],
)
def test_a_weight_cache_outlives_the_server_and_is_refused(box):
    check = checked(box)["no weight cache"]
    assert check.word == "RED" and "holds the weights in GPU memory while the server is stopped" in str(check)
    assert checked(Box(launch="x --weight-cache-mode off"))["no weight cache"].ok


def test_requests_in_flight_are_told_with_what_becomes_of_them():
    check = checked(Box(load=(3, 2)), drain_s=30.0)["requests in flight"]
    assert check.word == "WARN" and "3 running, 2 waiting; a window waits 30 s" in check.detail
    assert "then the server is stopped all the same" in check.detail
    left = checked(Box(load=(3, 2)), drain_s=30.0, on_busy="give up")["requests in flight"]
    assert "then the server is left alone" in left.detail


def test_a_window_that_would_give_up_before_systemd_does_is_refused():
    slow = Box({"systemctl show -p Load": SHOW.replace("1min 30s", "5min")})
    check = checked(slow, stop_timeout_s=120)["stop ends in time"]
    assert check.word == "RED" and "more than 300 s" in str(check) and "a window waits 120 s" in str(check)
    assert checked(slow)["stop ends in time"].word == "ok", "without a limit of its own it waits for systemd's"
    endless = Box({"systemctl show -p Load": SHOW.replace("1min 30s", "infinity")})
    assert checked(endless, stop_timeout_s=120)["stop ends in time"].word == "WARN"


def test_a_restart_between_two_questions_is_red():
    starts = iter(["NRestarts=0\nInvocationID=i1\n", "NRestarts=1\nInvocationID=i2\n"])
    check = checked(Box({"systemctl show -p NRestarts,Inv": lambda _: next(starts)}))["steady"]
    assert check.word == "RED" and "restart loop" in str(check)


def test_who_else_may_start_the_server_is_told():
    told = "ExecStart={ argv[]=x }\nNRestarts=0\nActiveEnterTimestampMonotonic=1\nTriggeredBy=warm.timer\n"
    check = checked(Box({"systemctl show -p ExecStart": told}))["nothing else starts it"]
    assert check.word == "WARN" and "warm.timer may start it" in check.detail


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"systemctl show -p ExecStart": "ExecStart={ argv[]=/usr/bin/docker run x }\n"}, "systemd runs", "docker"),
        ({"cat /proc/42/cgroup": "0::/kubepods.slice/pod1\n"}, "no other manager", "Kubernetes"),
        ({"cat /proc/42/cgroup": "0::/system.slice/slurmstepd.scope/job_1\n"}, "no other manager", "Slurm"),
        ({"cat /proc/42/cgroup": "0::/system.slice/docker-ab.scope\n"}, "no other manager", "Docker"),
    ],
)
def test_other_managers_are_refused_with_the_reason(changes, name, said):
    (check,) = [check for key, check in checked(Box(changes)).items() if key.startswith(name)]
    assert check.word == "RED" and said in check.detail and len(check.remedy) > 40


def test_a_host_without_systemd_is_refused_with_every_other_answer_given():
    gone = (127, "")
    checks = checked(Box({"systemctl": gone, "env": gone}))
    check = checks["systemd"]
    assert check.word == "RED" and "containers, Kubernetes pods and Slurm jobs are not borrowed" in str(check)
    assert checks["model"].ok and checks["no MIG"].ok


def test_jobs_of_a_dead_window_are_told_and_no_obstacle():
    box = Box({"env": "lease=\nrestoring=\nquarantine=\njob=taugate-job-w0-1.service\n"})
    check = checked(box)["no job left over"]
    assert check.word == "WARN" and "taugate-job-w0-1.service: stopped as the window opens" in check.detail


class Queue:
    """A host that is held for some polls, on a clock of its own."""

    def __init__(self, *holders):
        self.holders, self.now, self.said = list(holders), 0.0, []

    def wait(self, seconds):
        def status(_):
            holder = self.holders.pop(0) if len(self.holders) > 1 else self.holders[0]
            if isinstance(holder, Exception):
                raise holder
            return f"lease={holder}\nrestoring=\n"

        def sleep(seconds):
            self.now += seconds

        host = Host(HostSettings(UNIT, host="box"), Box({"env": status}))
        wait_until_free(host, seconds, self.said.append, clock=lambda: self.now, sleep=sleep)


BOB, EVE = "taugate window w2 bob@lab", "taugate window w3 eve@lab"


def test_a_second_run_fails_at_once_or_waits_naming_the_owner():
    with pytest.raises(WindowError, match="box is still in use by `taugate window w2 bob@lab`: wait until"):
        Queue(BOB).wait(0)
    queue = Queue(BOB, BOB, EVE, "")
    queue.wait(60)
    assert queue.now == 6 and [BOB in queue.said[0], EVE in queue.said[1]] == [True, True]
    assert "waiting, 0 s of at most 60 s" in queue.said[0]


def test_waiting_ends_with_the_owner_s_name_and_tells_how_it_goes():
    queue = Queue(BOB)
    with pytest.raises(WindowError, match="bob@lab` after 100 s"):
        queue.wait(100)
    assert queue.now == 100 and len(queue.said) == 4


def test_a_host_that_is_free_or_cannot_be_asked_is_not_waited_for():
    for holder in ("", HostError("no route")):
        queue = Queue(holder)
        queue.wait(100)
        assert (queue.now, queue.said) == (0, [])
