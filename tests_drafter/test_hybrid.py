"""The hybrid pair against an oracle that runs the target for every cycle, from the first token, without a
cache.

The public implementation is not lossless on recurrent layers: transformers cannot crop their state. So the
oracle keeps none, and what it accepts is what an exact engine would.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fixtures.host import PAIR
from taugate.drafter.model import load_drafter
from taugate.drafter.replay import CachedSequence, Verifier, anchor_table, walk, walk_together
from taugate.drafter.tree import scores
from taugate.target.kernels import kernel_path

from . import oracles, tiny

pytestmark = pytest.mark.drafter
TREE = Verifier.parse("ddtree-16")
CHAIN = Verifier.parse("chain")


class Oracle:
    """Speculative decoding with no state but the text."""

    def __init__(self, target, drafter):
        self.target, self.drafter = target, drafter
        self.embedding = target.get_input_embeddings().weight.detach()

    @torch.inference_mode()
    def states(self, tokens):
        """Taps [S, K·H] and next tokens [S] of a text, from one forward."""
        with kernel_path("torch", "qwen3_5_text", "cpu"):
            out = self.target(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
        taps = torch.cat([out.hidden_states[tap + 1] for tap in self.drafter.config.target_layer_ids], -1)
        return taps[0], out.logits[0].argmax(-1).tolist()

    def decode(self, prompt, new, end, accept):
        """Text and lengths of its cycles; `accept` gives the drafted tokens that a verifier keeps."""
        tokens, lengths = [*prompt, self.states(prompt)[1][-1]], []
        cap = len(prompt) + new
        while len(tokens) < cap and tokens[-1] != end:
            anchor = len(tokens) - 1
            taps, _ = self.states(tokens[:anchor])
            size = min(self.drafter.config.block_size, cap - anchor)
            kept, bonus = accept(
                self, tokens, tiny.draft(self.drafter, tokens, taps, anchor, size, *[self.embedding] * 2)
            )
            emitted = [*kept, bonus][: cap - len(tokens)]
            if end in emitted:
                emitted = emitted[: emitted.index(end) + 1]
            tokens, lengths = tokens + emitted, [*lengths, len(emitted)]
        return tuple(tokens), lengths


def chain(oracle, tokens, draft):
    """The longest prefix of the block that the target itself continues with, from one forward over all of
    it.
    """
    _, guessed = draft
    follows = oracle.states([*tokens, *guessed])[1][len(tokens) - 1 :]
    run = next((n for n, (a, b) in enumerate(zip(guessed, follows, strict=False)) if a != b), len(guessed))
    return guessed[:run], follows[run]


def tree(oracle, tokens, draft):
    """From the root to the child that the target chooses, as long as the tree has it; one forward per
    node.
    """
    logits, _ = draft
    order = logits.sort(dim=-1, descending=True, stable=True).indices.tolist()
    sorted_logprobs = np.sort(logits.double().log_softmax(-1).numpy())[None, :, ::-1]
    nodes = set(oracles.heap_order(scores(sorted_logprobs)[0], TREE.size))
    kept, ranks = [], ()
    while True:
        follows = oracle.states([*tokens, *kept])[1][-1]
        rank = order[len(kept)].index(follows) if len(kept) < len(order) else None
        if rank is None or (*ranks, rank) not in nodes:
            return kept, follows
        kept, ranks = [*kept, follows], (*ranks, rank)


@pytest.fixture(scope="module")
def oracle():
    from transformers import AutoModelForCausalLM

    with kernel_path("torch", "qwen3_5_text", "cpu"):
        target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32, local_files_only=True)
    return Oracle(target.eval().requires_grad_(False), load_drafter(PAIR / "drafters" / "reference"))


def prompts(count):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    lines = (PAIR.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer.encode(json.loads(line)["text"]).ids for line in lines[:count]]


def agree(oracle, count, new):
    """Replay and oracle give the same cycles, for the chain and for a tree; returns the chain's lengths."""
    end, seen = oracle.target.config.eos_token_id, []
    for number, prompt in enumerate(prompts(count)):
        text, lengths = oracle.decode(prompt, new, end, chain)
        again, in_tree = oracle.decode(prompt, new, end, tree)
        assert again == text, "greedy decoding gives one text, whatever verifies"
        sequence = CachedSequence(str(number), text, len(prompt), len(prompt) + new)
        taps, _ = oracle.states(text)
        found = anchor_table(oracle.drafter, sequence, taps, *[oracle.embedding] * 2, [CHAIN, TREE])
        assert [cycle.emitted for cycle in walk(found, "chain")] == lengths
        assert [cycle.emitted for cycle in walk(found, TREE.name)] == in_tree
        ((_, walked),) = walk_together(oracle.drafter, [(sequence, taps)], *[oracle.embedding] * 2, CHAIN)
        assert [cycle.emitted for cycle in walked] == lengths
        seen += lengths
    return seen


def test_a_few_prompts_give_the_oracles_cycles(oracle):
    lengths = agree(oracle, 2, 16)
    assert len(set(lengths)) >= 3, "runs of several lengths were meant to occur"


@pytest.mark.slow
def test_many_prompts_give_the_oracles_cycles(oracle):
    lengths = agree(oracle, 4, 48)
    assert len(set(lengths)) >= 5, "runs of every kind were meant to occur"
