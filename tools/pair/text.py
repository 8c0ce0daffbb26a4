"""Tokenizer, and texts as one stream of ids."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tools.pair.shapes import END, MASK


def train_tokenizer(texts: list[str], path: Path, size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[END, MASK]
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], end: int) -> tuple[Tensor, Tensor]:
    """All texts as one id stream, and the stream positions at which a top-level statement of a file begins."""
    size = tokenizer.get_vocab_size()
    newline = {i for i in range(size) if tokenizer.decode([i]).endswith("\n")}
    stream = list(chain.from_iterable(e.ids + [end] for e in tokenizer.encode_batch(texts)))
    ids = torch.tensor(stream)
    breaks = torch.zeros(size, dtype=torch.bool)
    breaks[list(newline)] = True
    # A line that starts without indentation: the token before it ends in a newline, its own begins with a letter.
    letter = torch.tensor(
        [
            tokenizer.decode([i])[:1] in set('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@_"#')
            for i in range(size)
        ]
    )
    begins = (breaks[ids[:-1]] & letter[ids[1:]]).nonzero()[:, 0] + 1
    return ids, begins


def windows(source: Tensor, starts: Tensor, length: int, device: str) -> Tensor:
    return torch.stack([source[s : s + length] for s in starts.tolist()]).to(device)
