"""Completions: the served model's own greedy continuations as token ids, taken while it is up and kept by content.

They are asked one by one. Greedy output changes with batch size and cache state near ties, so a completion is a
reference text with its provenance, not a bit-exact truth; the on-policy rate says later whether it fits the states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taugate.drafter.replay import CachedSequence
from taugate.errors import HostError, StoreError
from taugate.files import sha256_json, write_atomic
from taugate.host.sglang import ServerIdentity, SGLangClient
from taugate.pipeline.prompts import Prompt
from taugate.target.checkpoint import TargetInfo


@dataclass(frozen=True)
class CompletionStore:
    """completions/<key[:2]>/<key>.json below `root`."""

    root: Path

    def path(self, key: str) -> Path:
        return self.root / "completions" / key[:2] / f"{key}.json"

    def load(self, key: str) -> dict[str, Any] | None:
        """The stored completion, or None. Raises StoreError naming a damaged file."""
        path = self.path(key)
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"{path} is damaged ({error}); delete it to ask the server again") from None
        if sha256_json(entry.get("fields")) != key or sha256_json(entry.get("answer")) != entry.get("answer_sha256"):
            raise StoreError(f"{path} does not have the content that its key names; delete it to ask the server again")
        return entry

    def save(self, key: str, fields: dict[str, Any], answer: dict[str, Any]) -> None:
        entry = {"fields": fields, "answer": answer, "answer_sha256": sha256_json(answer)}
        write_atomic(self.path(key), json.dumps(entry))


def complete(
    server: SGLangClient,
    identity: ServerIdentity,
    target: TargetInfo,
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    store: CompletionStore,
    progress: Callable[[int, int], None],
    ask: bool = True,
) -> tuple[list[CachedSequence], list[str]]:
    """One CachedSequence per prompt, from the store or from the server, and the keys that are in neither.

    ask: whether the server may be asked; if not, prompts without a cached completion are left out and their keys
    returned. progress(done, of) is called after each one asked. Raises HostError if the server fails, StoreError for
    a damaged entry. What was got before an error is kept.
    """
    keyed = [(_fields(identity, target, ids, max_new_tokens)) for ids in prompt_ids]
    keys = [sha256_json(fields) for fields in keyed]
    todo = [index for index, key in enumerate(keys) if store.load(key) is None]
    for number, index in enumerate(todo if ask else (), 1):
        generation = server.generate(list(prompt_ids[index]), max_new_tokens)
        answer = {
            "output_ids": list(generation.output_ids),
            "finish_reason": generation.finish_reason,
            "cached_tokens": generation.cached_tokens,
            "server": asdict(identity),
        }
        store.save(keys[index], keyed[index], answer)
        progress(number, len(todo))
    sequences = []
    for prompt, ids, key in zip(prompts, prompt_ids, keys, strict=True):
        if entry := store.load(key):
            sequences.append(_sequence(prompt, ids, entry["answer"], max_new_tokens, target))
    return sequences, [] if ask else [keys[index] for index in todo]


def _fields(identity: ServerIdentity, target: TargetInfo, ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    """What decides a completion. The model's content counts, and how it was served: launch command and version."""
    return {
        "weights_sha256": target.weights_sha256,
        "tokenizer_sha256": target.tokenizer_sha256,
        "prompt_ids": list(ids),
        "max_new_tokens": max_new_tokens,
        "sampling": "greedy",
        "launch_command": _stable(identity.launch_command),
        "version": identity.version,
    }


def _stable(launch_command: str) -> str:
    """The command without what a restart may change and the output does not depend on: paths and the port."""
    import shlex

    words = shlex.split(launch_command)
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("--port", "--host", "--model-path", "--model", "--served-model-name", "--log-level"):
            skip = True
        elif not word.startswith("/"):
            kept.append(word)
    return shlex.join(kept)


def _sequence(
    prompt: Prompt, ids: Sequence[int], answer: dict[str, Any], max_new_tokens: int, target: TargetInfo
) -> CachedSequence:
    output = answer["output_ids"]
    stopped = answer["finish_reason"] == "stop"
    if not output or len(output) > max_new_tokens:
        raise HostError(
            f"the server gave {len(output)} tokens for prompt {prompt.id!r}; 1…{max_new_tokens} were asked for"
        )
    if not stopped and len(output) != max_new_tokens:
        raise HostError(
            f"the server ended prompt {prompt.id!r} after {len(output)} tokens for {answer['finish_reason']!r}; "
            "neither the end-of-text token nor the cap, so its last cycle would be unknown"
        )
    if stopped and target.eos_token_ids and output[-1] not in target.eos_token_ids:
        raise HostError(
            f"the server stopped prompt {prompt.id!r} at token {output[-1]}, "
            "which is no end-of-text token of the target"
        )
    outside = [token for token in output if not 0 <= token < target.vocab_size]
    if outside:
        raise HostError(
            f"the server gave token {outside[0]} for prompt {prompt.id!r}; the vocabulary has {target.vocab_size}"
        )
    return CachedSequence(prompt.id, (*ids, *output), len(ids), len(ids) + max_new_tokens, prompt.tags)
