"""The pairs that benchmarks/replay.py runs: the shipped full-attention one, and random states of any size."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from taugate.drafter.config import parse_config
from taugate.drafter.model import Drafter, load_drafter
from taugate.drafter.replay import CachedSequence

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "embedded"


@dataclass
class FullAttentionPair:
    """Target, drafter in both implementations, tokenizer."""

    name: str
    target: Any
    drafter: Drafter
    public: Any
    public_drafter: Any
    texts: list[list[int]]

    @property
    def embedding(self) -> Tensor:
        return self.target.get_input_embeddings().weight.detach()

    @property
    def head(self) -> Tensor:
        return self.target.lm_head.weight.detach()

    @classmethod
    def load(cls, directory: Path) -> FullAttentionPair:
        """The pair in `directory`/{target,drafter}, in fp32, with the prompts that the project ships."""
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM, Qwen3Config

        for part in ("target", "drafter"):
            if not (directory / part / "config.json").is_file():
                raise SystemExit(f"{directory} has no {part}/config.json; name a directory with target/ and drafter/")
        # The public package calls transformers by names that it has since deprecated.
        warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
        public = importlib.import_module("dflash.model")
        public._cuda_time = lambda: 0.0  # it synchronises a GPU, which is not there
        target = AutoModelForCausalLM.from_pretrained(directory / "target", dtype=torch.float32, local_files_only=True)
        raw = json.loads((directory / "drafter" / "config.json").read_text())
        drafter = load_drafter(directory / "drafter")
        given = {key: value for key, value in raw.items() if key not in ("architectures", "model_type", "dtype")}
        theirs = public.DFlashDraftModel(Qwen3Config(**given)).eval()
        theirs.load_state_dict(drafter.state_dict())
        tokenizer = Tokenizer.from_file(str(directory / "target" / "tokenizer.json"))
        lines = (FIXTURES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [tokenizer.encode(json.loads(line)["text"]).ids for line in lines]
        return cls(directory.name, target.eval().requires_grad_(False), drafter, public, theirs, texts)

    def prompts(self, count: int, length: int = 32) -> list[list[int]]:
        """Prompts of one length, so that the target can complete all of them in one batch."""
        return [ids[:length] for ids in self.texts if len(ids) >= length][:count]

    def dflash_generate(self, ids: list[int], new: int) -> Any:
        return self.public.dflash_generate(
            self.public_drafter,
            self.target,
            torch.tensor([ids]),
            new,
            [self.target.config.eos_token_id],
            return_stats=True,
        )

    @torch.inference_mode()
    def complete(self, prompts: list[list[int]], new: int) -> list[CachedSequence]:
        """Greedy completions of all prompts in one batch, as a server would make them."""
        end, cache = self.target.config.eos_token_id, None
        step = torch.tensor(prompts)
        rows: list[Tensor] = []
        for _ in range(new):
            out = self.target(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
            rows.append(step[:, 0])
        sequences = []
        for number, (prompt, tail) in enumerate(zip(prompts, torch.stack(rows, 1).tolist(), strict=True)):
            kept = tail[: tail.index(end) + 1] if end in tail else tail
            sequences.append(CachedSequence(str(number), (*prompt, *kept), len(prompt), len(prompt) + new))
        return sequences

    @torch.inference_mode()
    def states(self, sequence: CachedSequence) -> Tensor:
        out = self.target.model(torch.tensor([sequence.token_ids]), output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[tap + 1] for tap in self.drafter.config.target_layer_ids], -1)[0]


def _tiny_config(window: int | None) -> dict[str, Any]:
    kinds = ["full_attention" if window is None else "sliding_attention"] * 2
    return {
        "layer_types": kinds, "sliding_window": window, "use_sliding_window": window is not None,
        "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "num_target_layers": 10, "block_size": 8, "mask_token_id": 1, "target_layer_ids": [1, 3, 5, 7, 8],
    }  # fmt: skip


def _drafter(window: int | None) -> tuple[Drafter, Tensor, Tensor]:
    torch.manual_seed(0)
    drafter = Drafter(parse_config(_tiny_config(window), "benchmark")).eval().requires_grad_(False)
    table = torch.randn(2048, 128)
    return drafter, table, table


def _stream(
    drafter: Drafter, embedding: Tensor, head: Tensor, prompts: int, new: int
) -> Iterator[tuple[CachedSequence, Tensor]]:
    """Random texts and states, made one by one as they are read.

    Random drafts are refused: one cycle per token.
    """
    width = drafter.fc.in_features
    for number in range(prompts):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(2, 2048, (32 + new,), generator=generator).tolist()
        yield CachedSequence(str(number), tuple(ids), 32, 32 + new), torch.randn(32 + new, width, generator=generator)


random_states = SimpleNamespace(drafter=_drafter, stream=_stream)
