"""Records what the real server answers, in every state that a window sees it in.

    python -m tools.contract [--out fixtures/contract]

Needs root and SGLang, as `make contract` installs it. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fixtures.testhost.host import MODEL, SERVICE, SystemdHost
from taugate.errors import TaugateError
from taugate.files import write_atomic
from taugate.polling import poll
from tools.contract import record
from tools.contract.server import VERSION, real_host, venv

PROMPT = list(b"Hello")
GREEDY = {"temperature": 0, "max_new_tokens": 8}
BEYOND = 1_000_000  # the model has 264 token ids, and SGLang rounds its table up: the next ones are not noticed
DRAIN_TOKENS = 600  # about eight seconds on two cores: longer than the poll of SGLang's shutdown (5 s)

OLD_NAMES = {"/get_model_info": "/model_info", "/get_server_info": "/server_info"}

# Everything that is asked of a server that is ready: name, method, path, body.
QUESTIONS: tuple[tuple[str, str, str, Any], ...] = (
    ("health", "GET", "/health", None),
    ("ready", "GET", "/ready", None),
    ("models", "GET", "/v1/models", None),
    ("model_info", "GET", "/model_info", None),
    ("server_info", "GET", "/server_info", None),
    ("loads", "GET", "/v1/loads", None),
    ("generate: length", "POST", "/generate", {"input_ids": PROMPT, "sampling_params": GREEDY}),
    ("generate: top logprobs", "POST", "/generate", {
        "input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2}),
    ("generate: stop", "POST", "/generate", {
        "input_ids": PROMPT, "sampling_params": {**GREEDY, "stop_token_ids": list(range(256))}}),
    ("completions", "POST", "/v1/completions", {
        "model": "another name", "prompt": "Hello", "max_tokens": 8, "temperature": 0}),
    ("generate: no prompt", "POST", "/generate", {"sampling_params": GREEDY}),
    ("generate: empty prompt", "POST", "/generate", {"input_ids": [], "sampling_params": GREEDY}),
    ("generate: not token ids", "POST", "/generate", {"input_ids": ["a"], "sampling_params": GREEDY}),
    ("generate: beyond the context", "POST", "/generate", {
        "input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 100_000}}),
    ("completions: no prompt", "POST", "/v1/completions", {"model": MODEL}),
    ("no such path", "GET", "/no-such-path", None),
    ("no such method", "GET", "/generate", None),
)  # fmt: skip


def recordings(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(state, what was seen), one after the other: four starts of the server, the second stopped at once."""
    with real_host(directory, enabled=False, restart="no") as host:
        loading = record.start(host)
        yield "ready", _ready(host)
        yield "stop-mixed", _drain(host, "mixed")
        host.inside("systemctl", "start", SERVICE)
        poll(lambda: len(record.names(host)) > 3, deadline=200, what="its child processes")
        yield "loading", {"timeline": loading, "stopped": _stop(host)}
        record.start(host)
        record.set_kill_mode(host, "control-group")
        yield "stop-control-group", _drain(host, "control-group")
        record.start(host)
        yield "crash", _crash(host)


def _ready(host: SystemdHost) -> dict[str, Any]:
    """Everything asked once, a request under way and its abort."""
    asked = [
        {"name": name, "request": {"method": method, "path": path, "body": body}}
        | record.exchange(host, method, path, body)
        for name, method, path, body in QUESTIONS
    ]
    old = {}
    for path, name in OLD_NAMES.items():
        answer, now = record.exchange(host, "GET", path), record.exchange(host, "GET", name)
        old[path] = {"status": answer["status"], "same_keys_as": name if _same_keys(answer, now) else None}
    with record.in_flight(host, 1500) as request:
        loads = record.exchange(host, "GET", "/v1/loads")
        abort = record.exchange(host, "POST", "/abort_request", {"abort_all": True})
    busy = {"loads": loads, "abort": abort, "aborted": request.answer}
    return {"exchanges": asked, "old_names": old, "busy": busy, "processes": record.names(host)}


def _same_keys(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one["status"] == two["status"] == 200 and one["body"].keys() == two["body"].keys()


def _drain(host: SystemdHost, kill_mode: str) -> dict[str, Any]:
    """A stop by systemd with a request under way."""
    before = record.names(host)
    with record.in_flight(host, DRAIN_TOKENS) as request, record.Timeline(host) as timeline:
        poll(lambda: len(timeline.now) == len(record.POLLED), deadline=30, what="the first answers")
        stop_at = timeline.seconds
        host.inside("systemctl", "stop", "--no-block", SERVICE)
        poll(lambda: timeline.now["/ready"] != 200, deadline=20, what="draining", interval=0.02)
        asked = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "temperature": 0}
        new = record.exchange(host, "POST", "/v1/completions", asked)
        record.wait_ended(host)
        stopped_at = timeline.seconds
        poll(lambda: timeline.now["/ready"] == record.REFUSED, deadline=20, what="refusals", interval=0.02)
    running = {"tokens": request.tokens, "seconds": request.seconds} | request.answer
    return {
        "kill_mode": kill_mode, "stop_at": stop_at, "seconds": round(stopped_at - stop_at, 2),
        "timeline": timeline.changes, "in_flight": running, "new_request": new, "unit": record.ended(host),
        "processes_before": before, "processes_after": record.names(host),
    }  # fmt: skip


def _stop(host: SystemdHost) -> dict[str, Any]:
    before, begun = record.names(host), time.monotonic()
    host.inside("systemctl", "stop", "--no-block", SERVICE)
    record.wait_ended(host)
    return {
        "seconds": round(time.monotonic() - begun, 2), "unit": record.ended(host),
        "processes_before": before, "processes_after": record.names(host),
    }  # fmt: skip


def _crash(host: SystemdHost) -> dict[str, Any]:
    """A token id that the model does not have."""
    with record.Timeline(host, ("/health", "/v1/models")) as timeline:
        body = {"input_ids": [BEYOND], "sampling_params": GREEDY}
        asked_at = timeline.seconds
        answer = record.exchange(host, "POST", "/generate", body)
        record.wait_ended(host)
        seconds = round(timeline.seconds - asked_at, 2)
    return {
        "request": {"method": "POST", "path": "/generate", "body": body}, "asked_at": asked_at, "answer": answer,
        "seconds": seconds, "timeline": timeline.changes, "unit": record.ended(host),
        "processes_after": record.names(host),
    }  # fmt: skip


def about() -> dict[str, str]:
    """What was recorded, when, and on what."""
    code = (
        "import platform, sys; from importlib.metadata import version;"
        "print(*map(version, ('sglang', 'torch', 'transformers')), platform.python_version(), sys.base_prefix)"
    )
    python = str(venv() / "bin/python")
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    sglang, torch, transformers, own, prefix = done.stdout.split()
    if sglang != VERSION:
        raise TaugateError(f"{python} has SGLang {sglang}, not {VERSION}: run `make contract` again")
    return {
        "server": "SGLang", "version": sglang, "recorded": datetime.now(UTC).date().isoformat(),
        "on": f"a CPU; Python {own}, torch {torch}, transformers {transformers}; the unit of a systemd 252 host",
        "model": "a random Qwen3ForCausalLM of 108 thousand parameters", "command": "make contract",
        "prefix": prefix,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.contract", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("fixtures/contract"))
    given = parser.parse_args()
    try:
        head = about()
        prefix = head.pop("prefix")
        with tempfile.TemporaryDirectory() as directory:
            for state, value in recordings(Path(directory) / "host"):
                kept = record.clean(value, lambda text: text.replace(prefix, "/usr"))
                text = json.dumps({"about": head} | kept, indent=1, ensure_ascii=False) + "\n"
                write_atomic(given.out / f"{state}.json", text)
                print(f"{given.out / state}.json: {len(text)} bytes", flush=True)
    except TaugateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
