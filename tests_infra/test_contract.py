"""The client and the stand-in server against answers of the real SGLang, as `make contract` recorded them.

Nothing here needs SGLang. The stand-in may say less than the real server, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import http.client
import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fixtures.embedded import serve
from fixtures.embedded.model import StubTarget
from fixtures.testhost.host import SERVICE, SystemdHost
from fixtures.testhost.needed import need_host
from taugate.errors import HostError
from taugate.host.local import LocalTransport
from taugate.host.sglang import Load, SGLangClient
from taugate.polling import poll
from tests_infra.contract import STATES, at, differences, recorded, sequence, value_at

LOADING, READY, MIXED, GROUP, CRASH = (recorded(state) for state in STATES)
EXCHANGES = {exchange["name"]: exchange for exchange in READY["exchanges"]}
# What taugate reads of an answer; the stand-in must have it too.
READ = {
    "models": ["data.0.id"],
    "model_info": ["model_path"],
    "server_info": ["launch_command", "version", "startup_time.tokenizer_e2e"],
    "loads": ["loads.0.num_running_reqs", "loads.0.num_waiting_reqs"],
    "generate: length": ["output_ids", "meta_info.finish_reason.type", "meta_info.prompt_tokens",
                         "meta_info.cached_tokens"],
    "generate: top logprobs": ["meta_info.output_top_logprobs.0.0.0", "meta_info.output_top_logprobs.0.0.1"],
    "generate: stop": ["meta_info.finish_reason.matched"],
    "generate: empty prompt": ["error.message"],
    "generate: not token ids": ["message"],
}  # fmt: skip
STAND_IN_ONLY = {".kernel_path: the real server does not say that"}


@contextlib.contextmanager
def listening(handler):
    """(port, server) of an HTTP server on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        web.daemon_threads = True
        threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield web.server_address[1]
        finally:
            web.shutdown()


@contextlib.contextmanager
def replaying(answers):
    """The client of a server that answers each path as recorded; others with 404."""

    class Replay(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            recording = answers.get(self.path, {"status": 404, "body": {"detail": "Not Found"}})
            body = recording.get("body")
            data = b"" if body is None else json.dumps(body).encode()
            self.send_response(recording["status"])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format, *args):
            pass

    with listening(Replay) as port:
        yield SGLangClient(LocalTransport("box"), port)


def when_ready(**changes):
    """path -> answer of the ready server, the first recorded for each."""
    answers = {}
    for exchange in EXCHANGES.values():
        answers.setdefault(exchange["request"]["path"], exchange)
    return answers | changes


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None
    except ConnectionRefusedError:
        return 0, None
    finally:
        connection.close()


# ---- the recordings


@pytest.mark.parametrize("state", STATES)
def test_a_recording_says_of_what_and_when(state):
    about = recorded(state)["about"]
    assert (about["server"], about["version"], about["command"]) == ("SGLang", serve.VERSION, "make contract")
    assert datetime.date.fromisoformat(about["recorded"]) >= datetime.date(2026, 11, 30)
    text = json.dumps(recorded(state))
    assert not [word for word in ("/root", "/home", "/tmp", ".cache", "pyenv") if word in text]


# ---- the client


def test_the_client_reads_who_serves():
    with replaying(when_ready()) as client:
        identity = client.identity()
        assert (identity.model_id, identity.model_path, identity.version) == ("tiny", "/models/tiny", "0.5.23")
        assert identity.launch_command.startswith("--model-path /models/tiny ")
        assert client.ready() and client.healthy()
        body = EXCHANGES["server_info"]["body"]
        assert client.startup_seconds() == body["startup_time"]["tokenizer_e2e"]
        assert client.startup_seconds() <= LOADING["timeline"][-1]["seconds"]
        assert client.loads() == Load(0, 0)
    old = when_ready()
    for name in ("model_info", "server_info"):
        assert READY["old_names"][f"/get_{name}"] == {"status": 200, "same_keys_as": f"/{name}"}
        old[f"/get_{name}"] = old.pop(f"/{name}")
    with replaying(old) as client:
        assert client.identity() == identity


def test_the_client_reads_generations():
    expected = EXCHANGES["generate: length"]["body"]
    prompt = EXCHANGES["generate: length"]["request"]["body"]["input_ids"]
    made = {}
    for name in ("generate: length", "generate: top logprobs", "generate: stop"):
        with replaying({"/generate": EXCHANGES[name]}) as client:
            made[name] = client.generate(prompt, 8, top_logprobs=2)
    length, top, stop = made.values()
    assert list(length.output_ids) == expected["output_ids"] and length.finish_reason == "length"
    assert length.prompt_tokens == len(prompt) and not length.top_logprobs
    assert top.output_ids == length.output_ids
    assert [best[0][1] for best in top.top_logprobs] == list(top.output_ids)
    assert all(len(best) == 2 and best[0][0] >= best[1][0] for best in top.top_logprobs)
    assert (stop.finish_reason, stop.matched) == ("stop", stop.output_ids[-1])


@pytest.mark.parametrize("name", [name for name, e in EXCHANGES.items() if e["status"] != 200])
def test_the_client_repeats_what_the_server_refuses(name):
    exchange = EXCHANGES[name]
    with replaying({"/generate": exchange}) as client, pytest.raises(HostError) as caught:
        client.generate([1], 8)
    said = exchange["body"].get("error", exchange["body"])
    assert f"answered {exchange['status']}" in str(caught.value) and "\n" not in str(caught.value)
    assert " ".join(said.get("message", "").split())[:40] in str(caught.value)


def test_the_client_sees_a_busy_server_and_an_aborted_request():
    busy = READY["busy"]
    with replaying({"/v1/loads": busy["loads"], "/generate": busy["aborted"]}) as client:
        assert client.loads() == Load(1, 0)
        with pytest.raises(HostError, match="ended a generation with 'abort'"):
            client.generate([72, 101], 1500)


def test_the_client_never_takes_a_server_for_ready_before_it_is():
    ready_at = next(c["seconds"] for c in LOADING["timeline"] if (c["path"], c["status"]) == ("/ready", 200))
    for change in LOADING["timeline"]:
        now = at(LOADING["timeline"], change["seconds"])
        if 0 in (now.get("/ready", 0), now.get("/health", 0)):
            continue  # refused: tests of the tunnel have that
        with replaying({path: {"status": now[path]} for path in ("/ready", "/health")}) as client:
            assert client.ready() == (change["seconds"] >= ready_at)
            assert client.healthy() == (now["/health"] == 200)


def test_the_client_never_takes_a_server_for_ready_that_drains():
    for stop in (MIXED, GROUP):
        left = [change for change in stop["timeline"] if change["seconds"] > stop["stop_at"]]
        assert sequence(left, "/ready")[0] != 200 and 200 not in sequence(left, "/ready")
        draining = {"/ready": {"status": 503}, "/health": {"status": 503}}
        with replaying(when_ready(**draining)) as client:
            assert not client.ready() and not client.healthy() and client.identity().model_id == "tiny"


# ---- the stand-in


class Held(serve.Server):
    """Generations of 600 tokens wait until they are let go."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.let_go = threading.Event()

    def generate(self, ids, params, top=0):
        if params.get("max_new_tokens") != 600:
            return super().generate(ids, params, top)
        with self.count:
            self.running += 1
        try:
            self.let_go.wait(10)
            return super().generate(ids, params | {"max_new_tokens": 8}, top)
        finally:
            with self.count:
                self.running -= 1


@pytest.fixture
def stand_in():
    """(server, port) of a stand-in that has its weights and is not ready yet."""
    args = argparse.Namespace(
        model_path="/models/tiny", served_model_name="tiny", port=30000, dtype="float32", engine="stub"
    )
    server = Held(args, StubTarget(), startup_s=0.5)
    with listening(serve.handler(server)) as port:
        yield server, port


def found(exchange, status, body, read=()):
    """What is wrong with the stand-in's answer, by the recording of the same request."""
    wrong = [] if status == exchange["status"] else [f"{status}, and the real server answers {exchange['status']}"]
    wrong += [text for text in differences(exchange["body"], body) if text not in STAND_IN_ONLY]
    for path in read:
        for who, value in (("the real server", exchange["body"]), ("the stand-in", body)):
            try:
                value_at(value, path)
            except (KeyError, IndexError, TypeError):
                wrong.append(f"{path}: {who} does not say it")
    return wrong


@pytest.mark.parametrize("name", list(EXCHANGES))
def test_the_stand_in_answers_as_the_real_server(stand_in, name):
    server, port = stand_in
    server.ready = True
    exchange = EXCHANGES[name]
    asked = exchange["request"]
    status, body = ask(port, asked["method"], asked["path"], asked["body"])
    assert found(exchange, status, body, READ.get(name, ())) == []


def test_the_stand_in_says_the_same_under_the_older_names(stand_in):
    _, port = stand_in
    for old, recording in READY["old_names"].items():
        status, body = ask(port, "GET", old)
        assert status == recording["status"] and body.keys() == ask(port, "GET", recording["same_keys_as"])[1].keys()


def test_the_stand_in_warms_up_as_the_real_server(stand_in):
    server, port = stand_in
    timeline = LOADING["timeline"]
    first = next(c["seconds"] for c in timeline if c["status"] != 0)
    ready_at = next(c["seconds"] for c in timeline if (c["path"], c["status"]) == ("/ready", 200))
    assert set(at(timeline, first - 0.01).values()) == {0} and first > 1  # refused until the weights are there
    warming, ready = at(timeline, ready_at - 0.01), at(timeline, timeline[-1]["seconds"])
    assert {path: ask(port, "GET", path)[0] for path in warming} == warming
    server.ready = True
    assert {path: ask(port, "GET", path)[0] for path in ready} == ready


def test_the_stand_in_counts_requests_as_the_real_server(stand_in):
    server, port = stand_in
    server.ready = True
    body = {"input_ids": [1], "sampling_params": {"temperature": 0, "max_new_tokens": 600}}
    request = threading.Thread(target=ask, args=(port, "POST", "/generate", body))
    request.start()
    poll(lambda: server.running, deadline=5, what="a running request", interval=0.01)
    status, body = ask(port, "GET", "/v1/loads")
    assert found(READY["busy"]["loads"], status, body, READ["loads"]) == []
    recorded_rank, rank = READY["busy"]["loads"]["body"]["loads"][0], body["loads"][0]
    assert [rank[k] for k in ("num_running_reqs", "num_waiting_reqs")] == [1, 0]
    assert [recorded_rank[k] for k in ("num_running_reqs", "num_waiting_reqs")] == [1, 0]
    server.let_go.set()
    request.join(10)


def test_the_stand_in_drains_as_the_real_server(stand_in):
    """SIGTERM to the main process alone: no longer ready, and yet new requests are taken."""
    server, port = stand_in
    server.ready = server.draining = True
    stop = MIXED
    assert stop["kill_mode"] == "mixed" and stop["in_flight"]["status"] == 200
    # Between its first 503 and the first refusal, when its running request has ended.
    second = next(c["seconds"] for c in stop["timeline"] if c["status"] == 503 and c["path"] == "/ready")
    end = next(c["seconds"] for c in stop["timeline"] if c["status"] <= 0)
    statuses = at(stop["timeline"], (second + end) / 2)
    assert {path: ask(port, "GET", path)[0] for path in statuses} == statuses
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    assert found(stop["new_request"], *ask(port, "POST", "/v1/completions", asked)) == []


SLOW = """
import sys, threading, time
from fixtures.embedded import serve
generate = serve.StubTarget.generate
serve.StubTarget.generate = lambda *a: (time.sleep(0.3), generate(*a))[1]
sys.exit(serve.main())
"""


@pytest.fixture
def process(tmp_path):
    """(process, port) of a stand-in in a process of its own that is ready; a generation takes 0.3 s."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
        port = free.server_address[1]
    argv = ["--model-path", str(tmp_path), "--served-model-name", "tiny", "--port", str(port), "--engine", "stub"]
    project = Path(__file__).resolve().parents[1]
    with subprocess.Popen([sys.executable, "-c", SLOW, *argv], cwd=project, stdout=subprocess.DEVNULL) as process:
        seen = [0]
        while seen[-1] != 200 and process.poll() is None:
            status = ask(port, "GET", "/ready")[0]
            seen += [status] if status != seen[-1] else []
        assert seen == sequence(LOADING["timeline"], "/ready")
        yield process, port
        process.kill()


def test_the_stand_in_ends_its_running_request_and_then_itself(process):
    process, port = process
    recording, answers = MIXED, []
    body = {"input_ids": [1, 2], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    request = threading.Thread(target=lambda: answers.append(ask(port, "POST", "/generate", body)))
    request.start()
    poll(
        lambda: ask(port, "GET", "/v1/loads")[1]["loads"][0]["num_running_reqs"],
        deadline=5, what="a running request", interval=0.01,
    )  # fmt: skip
    process.send_signal(signal.SIGTERM)
    request.join(10)
    status, body = answers[0]
    assert status == recording["in_flight"]["status"] == 200
    assert found(recording["in_flight"], status, body) == []
    assert (recording["unit"]["ExecMainCode"], recording["unit"]["ExecMainStatus"]) == ("1", "0")  # exited with 0
    assert process.wait(10) == 0


def test_a_token_id_that_the_model_has_not_kills_the_stand_in_as_it_kills_the_real_server(process):
    process, port = process
    assert CRASH["answer"]["status"] == -1 and CRASH["unit"]["ActiveState"] == "failed"
    asked = CRASH["request"]
    with pytest.raises(ConnectionError):
        ask(port, asked["method"], asked["path"], asked["body"])
    assert process.wait(10) == -int(CRASH["unit"]["ExecMainStatus"])


@pytest.mark.parametrize("recording", [MIXED, GROUP], ids=lambda recording: recording["kill_mode"])
def test_systemd_says_the_same_of_the_stand_in_s_end(recording, tmp_path):
    """With a request under way, under KillMode=mixed and under systemd's default, control-group."""
    need_host()
    with SystemdHost(tmp_path / "host", unit={"KillMode": recording["kill_mode"]}) as host:
        host.wait_serving()
        body = {"input_ids": [1], "sampling_params": {"temperature": 0, "max_new_tokens": 501}}
        answers = []
        request = threading.Thread(target=lambda: answers.append(host.ask("/generate", body, timeout=20)))
        request.start()
        poll(
            lambda: host.ask("/v1/loads")[1]["loads"][0]["num_running_reqs"],
            deadline=5, what="a running request", interval=0.02,
        )  # fmt: skip
        assert host.inside("systemctl", "stop", SERVICE).returncode == 0
        request.join(20)
        names = ("ActiveState", "Result")
        assert {name: host.show(SERVICE)[name] for name in names} == {name: recording["unit"][name] for name in names}
        assert (answers[0][0] == 200) == (recording["in_flight"]["status"] == 200)
        assert recording["processes_after"] == []


# ---- the comparison itself


@pytest.mark.parametrize(
    ("name", "path", "change", "says"),
    [
        ("models", "data.0", lambda model: model.pop("id"), "data.0.id: the real server does not say it"),
        ("models", "data.0", lambda model: model.update(id=7), ".data[0].id: str, and the real server says 7"),
        ("loads", "loads.0", lambda rank: rank.pop("num_running_reqs"), "num_running_reqs: the real server does not"),
        ("generate: length", "meta_info", lambda meta: meta.update(prompt_tokens="5"), "prompt_tokens: int, and"),
        ("generate: length", "meta_info", lambda meta: meta.pop("e2e_latency"), "e2e_latency: the real server"),
        ("server_info", "", lambda info: info.pop("launch_command"), "launch_command: the real server does not"),
    ],
)
def test_a_real_server_that_answers_otherwise_would_be_noticed(stand_in, name, path, change, says):
    server, port = stand_in
    server.ready = True
    exchange = copy.deepcopy(EXCHANGES[name])
    change(value_at(exchange["body"], path))
    asked = exchange["request"]
    status, body = ask(port, asked["method"], asked["path"], asked["body"])
    assert any(says in text for text in found(exchange, status, body, READ[name]))
    assert found(exchange | {"status": 503}, status, body)[0] == "200, and the real server answers 503"
