"""Prompts: a JSON-lines file becomes token ids, rendered with the target's own tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taugate.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One line of the prompts file: `id`, and `text` or `messages` (chat); `tags` are for slicing results."""

    id: str
    text: str | None
    messages: tuple[dict[str, Any], ...]
    tags: tuple[str, ...]


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts (all when None). Raises ConfigError naming file and line of what is unusable."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts file {path} cannot be read ({error}); set completions.prompts") from None
    prompts, seen = [], set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            raw = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} is not JSON ({error})") from None
        prompt = _prompt(raw, where)
        if prompt.id in seen:
            raise ConfigError(f"{where}: id {prompt.id!r} is used twice; results are paired by it")
        seen.add(prompt.id)
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"the prompts file {path} holds no prompt")
    return prompts[:limit]


def _prompt(raw: Any, where: str) -> Prompt:
    if not isinstance(raw, dict) or not isinstance(raw.get("id"), str) or not raw["id"]:
        raise ConfigError(f"{where}: a prompt is an object with a non-empty text `id`")
    text, messages = raw.get("text"), raw.get("messages")
    if (text is None) == (messages is None):
        raise ConfigError(f"{where}: prompt {raw['id']!r} needs either `text` or `messages`")
    if text is not None and (not isinstance(text, str) or not text):
        raise ConfigError(f"{where}: `text` of prompt {raw['id']!r} must be non-empty text")
    if messages is not None and not (
        isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)
    ):
        raise ConfigError(f"{where}: `messages` of prompt {raw['id']!r} must be a list of chat messages")
    tags = raw.get("tags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ConfigError(f"{where}: `tags` of prompt {raw['id']!r} must be a list of texts")
    return Prompt(raw["id"], text, tuple(messages or ()), tuple(tags))


def render(prompts: list[Prompt], tokenizer_dir: Path) -> list[list[int]]:
    """Token ids of each prompt: plain text as it is, chats through the tokenizer's template.

    Raises ConfigError for a chat when the tokenizer has no template, and for a prompt that renders to nothing.
    """
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    chat = None
    if any(prompt.messages for prompt in prompts):
        from transformers import AutoTokenizer

        chat = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
        if not chat.chat_template:
            raise ConfigError("the target's tokenizer has no chat template; give prompts as `text`, not `messages`")
    rendered = []
    for prompt in prompts:
        if prompt.text is not None:
            ids = plain.encode(prompt.text).ids
        else:
            ids = chat.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)  # type: ignore[union-attr]
        if not ids:
            raise ConfigError(f"prompt {prompt.id!r} renders to no tokens")
        rendered.append(list(ids))
    return rendered
