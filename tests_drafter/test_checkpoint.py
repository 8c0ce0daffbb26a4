"""Every published layout is read as written; whatever does not fit is named with key, expected and found."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from taugate.drafter.checkpoint import expected_shapes, parse_config, read_config
from taugate.drafter.model import load_drafter
from taugate.errors import CheckpointError

from . import tiny

REAL = {  # z-lab/Qwen3.6-27B-DFlash
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "num_target_layers": 64,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048, "use_sliding_window": True, "rms_norm_eps": 1e-6, "rope_theta": 10000000,
    "rope_scaling": None, "max_position_embeddings": 262144, "vocab_size": 248320, "tie_word_embeddings": False,
}  # fmt: skip


def speculators(raw, draft_vocab=tiny.VOCAB, **changes):
    """The same drafter as speculators saves it."""
    own = ("architectures", "dflash_config", "block_size", "num_target_layers")
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {key: value for key, value in raw.items() if key not in own},
        "draft_vocab_size": draft_vocab,
        "block_size": raw["block_size"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in raw["dflash_config"]["target_layer_ids"]],
        "mask_token_id": raw["dflash_config"]["mask_token_id"],
        **changes,
    }


def write(directory, raw, tensors):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def tensors(raw, seed=0):
    return dict(tiny.drafter(raw, seed).state_dict())


def test_the_published_27b_config():
    config = parse_config(REAL, "config.json")
    assert config.target_layer_ids == (1, 16, 31, 46, 61) and config.block_size == 16
    assert config.mask_token_id == 248070 and config.rope_theta == 1e7
    assert [config.causal(n) for n in range(5)] == [True] * 4 + [False]
    assert [config.window(n) for n in range(5)] == [2048] * 4 + [None]
    shapes = expected_shapes(config)
    assert len(shapes) == 11 * 5 + 3 and shapes["fc.weight"] == (5120, 25600)


def test_fields_on_top_and_nested_mean_the_same():
    nested, top = tiny.raw_config(), tiny.raw_config()
    nested["dflash_config"]["block_size"] = nested.pop("block_size")
    top |= top.pop("dflash_config")
    wanted = parse_config(tiny.raw_config(), "c")
    assert parse_config(nested, "c") == wanted == parse_config(top, "c")


def test_rope_in_both_spellings():
    old = tiny.raw_config(rope_scaling={"type": "linear", "factor": 2.0})
    new = tiny.raw_config(
        rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    )
    assert (
        parse_config(old, "c").rope
        == parse_config(new, "c").rope
        == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    )


def test_the_speculators_layout_is_the_same_drafter(tmp_path):
    raw = tiny.raw_config(("sliding_attention", "full_attention"))
    weights = tensors(raw)
    plain = load_drafter(write(tmp_path / "z-lab", raw, weights))
    spare = {name: torch.randn(tiny.VOCAB, tiny.HIDDEN) for name in ("embed_tokens.weight", "lm_head.weight")}
    spare |= {"verifier_norm.weight": torch.ones(tiny.HIDDEN)}
    other = load_drafter(write(tmp_path / "speculators", speculators(raw), {**weights, **spare}))
    assert other.config.target_layer_ids == plain.config.target_layer_ids == (1, 3)
    assert other.config.num_target_layers is None
    embedding, head = tiny.tables(plain.config)
    taps = torch.randn(12, 64)
    for anchor in (5, 9):
        both = [tiny.draft(m, list(range(12)), taps, anchor, 6, embedding, head)[0] for m in (plain, other)]
        assert torch.equal(*both)
    symmetric = parse_config(speculators(raw, sliding_window_non_causal=True), "c")
    assert not symmetric.causal(0)


def test_a_pruned_vocabulary_is_mapped_to_the_targets(tmp_path):
    raw, kept = tiny.raw_config(), torch.tensor([0, 3, 4, 17, 38])
    weights = {**tensors(raw), "lm_head.weight": torch.randn(5, tiny.HIDDEN), "d2t": kept - torch.arange(5)}
    weights["t2d"] = torch.zeros(tiny.VOCAB, dtype=torch.bool).index_fill_(0, kept, True)
    model = load_drafter(write(tmp_path, speculators(raw, 5), weights))
    embedding, head = tiny.tables(model.config)
    hidden = torch.randn(2, tiny.HIDDEN)
    logits = model.logits(hidden, head)
    assert logits.shape == (2, tiny.VOCAB)
    assert torch.equal(logits[:, kept], hidden @ weights["lm_head.weight"].T)
    assert logits.isfinite().sum() == 2 * 5 and set(logits.argmax(-1).tolist()) <= set(kept.tolist())
    weights["d2t"] = weights["d2t"] + tiny.VOCAB
    with pytest.raises(CheckpointError, match="d2t leads to token 78, expected below 40"):
        load_drafter(write(tmp_path, speculators(raw, 5), weights))


def test_dflash_2_with_the_published_names(tmp_path):
    raw = tiny.raw_config(nested=tiny.DFLASH2)
    weights = tensors(raw)
    for name in ("predecessor_codebook", "successor_codebook"):
        weights[f"candidate_selector.{name}"] = weights.pop(f"candidate_selector.{name}.weight")
    assert load_drafter(write(tmp_path, raw, weights)).config.dflash2.selector_top_k == 4


WRONG = {
    "num_hidden_layers": (None, "does not give num_hidden_layers"),
    "block_size": (1, "block_size is 1, expected at least 2"),
    "hidden_size": ("32", "hidden_size is '32', expected a positive int"),
    "num_key_value_heads": (3, "num_key_value_heads is 3, expected a divisor of num_attention_heads, 4"),
    "rms_norm_eps": (-1.0, "rms_norm_eps is -1.0, expected a positive float"),
    "layer_types": (["full_attention"], "must name 2 full_ or sliding_attention layers"),
    "rope_theta": (None, "gives no rope_theta"),
    "rope_scaling": (
        {"type": "dynamic", "factor": 2.0},
        "rope type 'dynamic' is not supported, expected one of default",
    ),
    "rope_parameters": ({"rope_type": "yarn", "rope_theta": 1e4}, "rope type 'yarn' needs factor, found None"),
    "is_causal": ("yes", "is_causal is 'yes', expected bool"),
    "num_target_layers": (3, r"target_layer_ids \[1, 3\] must be layer numbers 0…2 of the target"),
}
NESTED = {
    "mask_token_id": (tiny.VOCAB, "mask_token_id is 40, expected a token below vocab_size, 40"),
    "target_layer_ids": ([], r"target_layer_ids \[\] must be a list of layer numbers from 0 on"),
    "selector_rank": (6, "does not give conv_kernel_size"),
}


@pytest.mark.parametrize(("key", "value", "sentence"), [(k, *v) for k, v in WRONG.items()])
def test_a_wrong_field_is_named(key, value, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        parse_config(tiny.raw_config(**{key: value}), "config.json")


@pytest.mark.parametrize(("key", "value", "sentence"), [(k, *v) for k, v in NESTED.items()])
def test_a_wrong_nested_field_is_named(key, value, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        parse_config(tiny.raw_config(nested={key: value}), "config.json")


def test_taps_are_never_derived():
    raw = tiny.raw_config()
    del raw["dflash_config"]["target_layer_ids"]
    with pytest.raises(CheckpointError, match="does not give target_layer_ids; it is never derived"):
        parse_config(raw, "config.json")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"aux_hidden_state_layer_ids": [0, 3]}, "must be a list of layer numbers from 1 on"),
        ({"projector_type": "domino"}, "projector_type is 'domino', expected 'dflash'"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True, expected False"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3', expected 'dflash'"),
    ],
)
def test_other_speculators_are_refused(change, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        parse_config(speculators(tiny.raw_config(), **change), "config.json")


def test_sliding_layers_need_their_window():
    with pytest.raises(CheckpointError, match="need a sliding_window, found 16 with use_sliding_window False"):
        parse_config(tiny.raw_config(["sliding_attention"], use_sliding_window=False), "config.json")
    raw = tiny.raw_config(use_sliding_window=True, sliding_window=16)
    del raw["layer_types"]
    with pytest.raises(CheckpointError, match="does not give layer_types"):
        parse_config(raw, "config.json")


def test_tensors_that_do_not_fit_are_named(tmp_path):
    raw, weights = tiny.raw_config(), tensors(tiny.raw_config())
    name = "layers.1.self_attn.k_proj.weight"
    cases = {
        f"lacks tensor {name}, expected with shape \\[16, 32\\]": {k: v for k, v in weights.items() if k != name},
        "holds tensor lm_head.weight": {**weights, "lm_head.weight": torch.zeros(2, 2)},
        f"tensor {name} has shape \\[16, 8\\], its config expects \\[16, 32\\]": {
            **weights,
            name: weights[name][:, :8],
        },
        f"tensor {name} holds numbers that are not finite": {**weights, name: weights[name] * float("nan")},
    }
    for number, (sentence, held) in enumerate(cases.items()):
        with pytest.raises(CheckpointError, match=sentence):
            load_drafter(write(tmp_path / str(number), raw, held))


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has no config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds a list, expected an object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.raw_config()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="no .safetensors file; other weight formats are never opened"):
        load_drafter(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_drafter(tmp_path)


def test_a_target_of_another_vocabulary_is_refused():
    model = tiny.drafter()
    embedding, head = torch.zeros(41, tiny.HIDDEN), torch.zeros(40, tiny.HIDDEN)
    with pytest.raises(CheckpointError, match=r"embedding has shape \[41, 32\], the drafter expects \[40, 32\]"):
        tiny.draft(model, [1] * 8, torch.randn(8, 64), 4, 6, embedding, head)
    with pytest.raises(CheckpointError, match=r"taps are 60 wide, expected 64 for \(1, 3\)"):
        model.context(torch.zeros(1, 4, 60))
