"""The same numbers as the public `dflash` package: logits, and acceptance lengths cycle by cycle.

`make parity` installs the package (without its pins, which contradict ours); `make test` does that by itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fixtures.host import PAIR
from taugate.drafter.model import load_drafter
from taugate.drafter.replay import CachedSequence, Verifier, anchor_table, walk, walk_together

from . import tiny

# The public package calls transformers by names that it has since deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
SLIDING, FULL = "sliding_attention", "full_attention"
LAYOUTS = {
    "full": tiny.raw_config([FULL] * 3),
    "sliding": tiny.raw_config([SLIDING] * 3),
    "mixed": tiny.raw_config([SLIDING, SLIDING, FULL]),
    "symmetric": tiny.raw_config([SLIDING, FULL], is_causal=False),
    "causal": tiny.raw_config([FULL, FULL], is_causal=True),
    "softcap": tiny.raw_config([FULL], output_multiplier=0.7, final_logit_softcapping=3.0, input_embedding_scale=2.0),
    "yarn": tiny.raw_config(
        [FULL] * 2, rope_theta=None,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    "llama3": tiny.raw_config(
        [FULL] * 2, rope_theta=None,
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "linear": tiny.raw_config([FULL] * 2, rope_scaling={"type": "linear", "factor": 4.0}),
    "dflash2": tiny.raw_config([SLIDING, FULL], block=8, is_causal=False, nested=tiny.DFLASH2),
}  # fmt: skip


def public_drafter(public, raw, ours):
    """The public model with the weights of ours."""
    from transformers import Qwen3Config

    given = {
        key: value for key, value in raw.items() if key not in ("architectures", "model_type") and value is not None
    }
    config = Qwen3Config(**given)
    kind = public.DFlash2DraftModel if ours.config.dflash2 else public.DFlashDraftModel
    theirs = kind(config).eval()
    theirs.load_state_dict(ours.state_dict())
    return theirs


@pytest.mark.parametrize("known_bounds", [False, True])
@pytest.mark.parametrize("context", [5, 15, 16, 17, 60])
@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_logits(public, kind, context, known_bounds):
    """fp32, context shorter and longer than the window of 16, whole and cut blocks, all of the context read or only
    what is seen.
    """
    ours = tiny.drafter(LAYOUTS[kind], seed=3)
    theirs = public_drafter(public, LAYOUTS[kind], ours)
    embedding, head = tiny.tables(ours.config)
    taps, known = torch.randn(1, context + 7, 2 * tiny.HIDDEN), torch.randint(0, 39, (1, 2))
    full = ours.config.block_size
    anchors, sizes = torch.tensor([[context, context - 2]]), torch.tensor([[full, full - 3]])
    between = (context - 2, context) if known_bounds else None
    with torch.inference_mode():
        hidden = ours(ours.context(taps, blocks=2), known, anchors, sizes, embedding, between)
        for column, (anchor, size) in enumerate(zip(anchors[0].tolist(), sizes[0].tolist(), strict=True)):
            block = torch.full((1, size), tiny.MASK)
            block[0, 0] = known[0, column]
            scale = ours.config.input_embedding_scale
            noise, positions = embedding[block] * scale, torch.arange(anchor + size)[None]
            wanted = theirs(target_hidden=taps[:, :anchor], noise_embedding=noise, position_ids=positions)[:, 1:]
            wanted_logits = theirs.compute_logits(wanted, lambda h: h @ head.T)
            mine = hidden[:, column, 1:size]
            logits = ours.logits(mine, head)
            error = ((logits - wanted_logits).norm() / wanted_logits.norm()).item()
            assert error <= 1e-5, f"relative error {error:.1e}"
            if ours.config.dflash2:
                proposed = theirs.propose(wanted, known[:, column], lambda h: h @ head.T, 0.0)[0]
                assert ours.propose(mine, logits, known[:, column]).tolist() == proposed.tolist()


@dataclass(frozen=True)
class Pair:
    """A full-attention target and drafter(s), with greedy completions of theirs."""

    target: torch.nn.Module
    drafter: torch.nn.Module
    raw: dict
    prompts: list[list[int]]
    new: int
    end: int | None


def states(target, tokens: list[int], taps) -> Tensor:
    """Tapped states of a whole text in one forward, as a capture does it."""
    with torch.inference_mode():
        hidden = target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([hidden[tap + 1] for tap in taps], -1)[0]


def compare(public, pair: Pair) -> list[int]:
    """Acceptance lengths of both sides must be equal for every prompt; returns all of them."""
    theirs = public_drafter(public, pair.raw, pair.drafter)
    embedding, head = pair.target.get_input_embeddings().weight.detach(), pair.target.lm_head.weight.detach()
    items, wanted = [], []
    for number, prompt in enumerate(pair.prompts):
        ran = public.dflash_generate(
            theirs,
            pair.target,
            torch.tensor([prompt]),
            pair.new,
            [pair.end] if pair.end is not None else None,
            return_stats=True,
        )
        tokens = tuple(ran.output_ids[0].tolist())
        sequence = CachedSequence(str(number), tokens, len(prompt), len(prompt) + pair.new)
        items.append((sequence, states(pair.target, list(tokens), pair.drafter.config.target_layer_ids)))
        wanted.append(ran.acceptance_lengths)
    chain = Verifier.parse("chain")
    found = [
        [c.emitted for c in cycles] for _, cycles in walk_together(pair.drafter, iter(items), embedding, head, chain)
    ]
    assert found == wanted
    for (sequence, taps), lengths in list(zip(items, wanted, strict=True))[::5]:
        table = anchor_table(pair.drafter, sequence, taps, embedding, head, [chain])
        assert [cycle.emitted for cycle in walk(table, "chain")] == lengths
    return [length for lengths in wanted for length in lengths]


def random_pair(raw, seed) -> Pair:
    """An untrained target whose next token depends on few things, so that it is not all loops; both
    random.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tiny.VOCAB, hidden_size=tiny.HIDDEN, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(0, 39, (int(n),), generator=generator).tolist()
        for n in torch.randint(3, 30, (6,), generator=generator)
    ]
    return Pair(target, tiny.drafter(raw, seed), raw, prompts, 20, 7)


@pytest.mark.parametrize("kind", ["full", "mixed", "dflash2"])
def test_acceptance_lengths_of_random_pairs(public, kind):
    raw = {**LAYOUTS[kind], "rope_theta": 1e6}
    assert len(compare(public, random_pair(raw, seed=2))) >= 6


@pytest.fixture(scope="module")
def overfitted() -> Pair:
    """A drafter that has learnt its target's own continuations for a moment, so that runs of every length
    occur.
    """
    pair = random_pair(
        tiny.raw_config([FULL] * 2, block=6, nested={"mask_token_id": 39, "target_layer_ids": [1, 3, 4]}),
        seed=4,
    )
    target, drafter = pair.target, pair.drafter
    generator = torch.Generator().manual_seed(9)
    prompts = torch.randint(0, 39, (24, 6), generator=generator)
    tokens = prompts
    with torch.no_grad():
        for _ in range(26):
            tokens = torch.cat([tokens, target(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        taps = torch.stack([states(target, row, drafter.config.target_layer_ids).clone() for row in tokens.tolist()])
    embedding, head = (
        target.get_input_embeddings().weight.detach().clone(),
        target.lm_head.weight.detach().clone(),
    )
    optimizer = torch.optim.Adam(drafter.requires_grad_(True).parameters(), lr=5e-3)
    for _ in range(150):
        rows = torch.randint(0, 24, (12,), generator=generator)
        anchors = torch.randint(6, 27, (12, 4), generator=generator)
        where = anchors[..., None] + torch.arange(1, 6)
        hidden = drafter(
            drafter.context(taps[rows], blocks=4),
            tokens[rows].gather(1, anchors),
            anchors,
            torch.full_like(anchors, 6),
            embedding,
        )
        logits = drafter.logits(hidden[:, :, 1:], head)
        label = tokens[rows].gather(1, where.clamp(max=31).flatten(1)).view_as(where)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 2), label.flatten(), reduction="none")
        (loss * (where < 32).flatten()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    drafter.requires_grad_(False)
    return Pair(target, drafter, pair.raw, prompts[:16].tolist(), 26, 7)


def test_acceptance_lengths_of_an_overfitted_pair(public, overfitted):
    lengths = compare(public, overfitted)
    assert sum(lengths) / len(lengths) >= 2 and set(lengths) == set(range(1, 7)), "too easy a comparison"


TRAINED = PAIR.parent / "qwen3"


def test_acceptance_lengths_of_the_trained_pair(public):
    """50 prompts of our own writing, fp32: every cycle of every prompt accepts what the public
    implementation accepts.
    """
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(TRAINED / "target", dtype=torch.float32, local_files_only=True)
    tokenizer = Tokenizer.from_file(str(TRAINED / "target" / "tokenizer.json"))
    lines = (PAIR.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:50]
    prompts = [tokenizer.encode(json.loads(line)["text"]).ids[:64] for line in lines]
    raw = json.loads((TRAINED / "drafter" / "config.json").read_text())
    drafter = load_drafter(TRAINED / "drafter")
    pair = Pair(target.eval().requires_grad_(False), drafter, raw, prompts, 32, target.config.eos_token_id)
    lengths = compare(public, pair)
    assert sum(lengths) / len(lengths) >= 2 and set(lengths) == set(range(1, 9))
