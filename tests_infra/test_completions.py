"""Prompts and completions: what the server says is taken only if it can be replayed, and asked only once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from taugate.errors import ConfigError, HostError, StoreError
from taugate.host.sglang import Generation, ServerIdentity
from taugate.pipeline.completions import CompletionStore, complete
from taugate.pipeline.prompts import Prompt, read_prompts
from taugate.target.checkpoint import TargetInfo

TARGET = TargetInfo("tiny", "qwen3_5_text", 8, 256, 4096, (0,), True, "w" * 64, "t" * 64)
SERVER = ServerIdentity(
    "tiny", "/models/tiny", "python -m sglang.launch_server --model-path /models/tiny --port 1", "0.5.23"
)
PROMPT = Prompt("one", "def f", (), ("python",))


class Server:
    """Answers every request with the same generation, and counts."""

    def __init__(self, ids=(5, 6, 7), reason="length"):
        self.generation = Generation(tuple(ids), reason, None, 2, 0)
        self.asked = 0

    def generate(self, ids, max_new_tokens):
        self.asked += 1
        return self.generation


def ask(tmp_path, server, identity=SERVER, target=TARGET, prompts=(PROMPT,), new=3):
    ids = [[1, 2]] * len(prompts)
    return complete(server, identity, target, prompts, ids, new, CompletionStore(tmp_path), lambda done, of: None)[0]


def test_a_completion_is_asked_once_and_kept(tmp_path):
    server = Server()
    first, second = ask(tmp_path, server), ask(tmp_path, server)
    assert server.asked == 1 and first == second
    assert first[0].token_ids == (1, 2, 5, 6, 7)
    assert (first[0].prompt_length, first[0].cap, first[0].last) == (2, 5, 4)


@pytest.mark.parametrize(
    ("identity", "target", "again"),
    [
        (
            replace(SERVER, launch_command=SERVER.launch_command.replace("--port 1", "--port 2")),
            TARGET,
            False,
        ),
        (replace(SERVER, model_path="/elsewhere/tiny"), TARGET, False),
        (replace(SERVER, launch_command=SERVER.launch_command + " --quantization fp8"), TARGET, True),
        (replace(SERVER, version="0.6.0"), TARGET, True),
        (SERVER, replace(TARGET, weights_sha256="x" * 64), True),
        (SERVER, replace(TARGET, tokenizer_sha256="x" * 64), True),
    ],
)
def test_what_decides_a_completion_is_in_its_key(tmp_path, identity, target, again):
    server = Server()
    ask(tmp_path, server)
    ask(tmp_path, server, identity, target)
    assert server.asked == (2 if again else 1)


@pytest.mark.parametrize(
    ("ids", "reason", "sentence"),
    [
        ((), "length", "0 tokens"),
        ((1, 2, 3, 4), "length", "4 tokens"),
        ((1, 2), "length", "neither the end-of-text token nor the cap"),
        ((1, 2), "abort", "neither the end-of-text token nor the cap"),
        ((1, 2), "stop", "token 2, which is no end-of-text token"),
        ((1, 9999, 3), "length", "token 9999"),
    ],
)
def test_an_answer_that_cannot_be_replayed_is_refused(tmp_path, ids, reason, sentence):
    with pytest.raises(HostError, match=sentence):
        ask(tmp_path, Server(ids, reason))


def test_an_end_of_text_token_ends_the_sequence(tmp_path):
    (sequence,) = ask(tmp_path, Server((5, 0), "stop"))
    assert sequence.token_ids == (1, 2, 5, 0) and sequence.cap == 5


def test_a_damaged_completion_is_an_error_that_names_the_file(tmp_path):
    ask(tmp_path, Server())
    (file,) = (tmp_path / "completions").rglob("*.json")
    entry = json.loads(file.read_text())
    entry["answer"]["output_ids"][0] = 8
    file.write_text(json.dumps(entry))
    with pytest.raises(StoreError, match=str(file)):
        ask(tmp_path, Server())


def test_what_was_got_before_an_error_is_kept(tmp_path):
    class Breaking(Server):
        def generate(self, ids, max_new_tokens):
            if self.asked == 1:
                raise HostError("the server went away")
            return super().generate(ids, max_new_tokens)

    prompts = (PROMPT, replace(PROMPT, id="two", text="class g"))
    ids = [[1, 2], [3, 4]]
    store = CompletionStore(tmp_path)
    with pytest.raises(HostError, match="went away"):
        complete(Breaking(), SERVER, TARGET, prompts, ids, 3, store, lambda done, of: None)
    server = Server()
    found, unasked = complete(server, SERVER, TARGET, prompts, ids, 3, store, lambda done, of: None)
    assert (len(found), unasked) == (2, [])
    assert server.asked == 1, "the first answer was kept"


def test_a_server_that_must_not_be_asked_is_not(tmp_path):
    server, store = Server(), CompletionStore(tmp_path)
    found, unasked = complete(server, SERVER, TARGET, (PROMPT,), [[1, 2]], 3, store, lambda done, of: None, ask=False)
    assert (found, len(unasked), server.asked) == ([], 1, 0)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("", "holds no prompt"),
        ('{"id": "a", "text": "x"}\nnot json', "line 2 is not JSON"),
        ('{"text": "x"}', "line 1: a prompt is an object with a non-empty text `id`"),
        ('{"id": "a"}', "needs either `text` or `messages`"),
        ('{"id": "a", "text": "x", "messages": []}', "needs either"),
        ('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}', "line 2: id 'a' is used twice"),
        ('{"id": "a", "text": ""}', "must be non-empty text"),
        ('{"id": "a", "text": "x", "tags": "python"}', "`tags`"),
    ],
)
def test_an_unusable_prompts_file_names_its_line(tmp_path, lines, sentence):
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    with pytest.raises(ConfigError, match=sentence) as caught:
        read_prompts(file)
    assert str(file) in str(caught.value)
