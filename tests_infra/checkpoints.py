"""Small random checkpoints of every supported family, laid out on the disk as the public ones are."""

from __future__ import annotations

import json
import re
from pathlib import Path

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "eos_token_id": 0, "pad_token_id": 0,
    "bos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}  # fmt: skip
FAMILIES = {
    "qwen3_5": SIZES | LINEAR,
    "qwen3_5_moe": SIZES | LINEAR | EXPERTS,
    "qwen3_next": SIZES | LINEAR | EXPERTS,
    "qwen3": SIZES,
    "llama": SIZES,
}


def text_model(family: str):
    """The family's text model with an output head, in bfloat16, from a fixed seed."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    multimodal = family.startswith("qwen3_5")
    config = CONFIG_MAPPING[f"{family}_text" if multimodal else family](**FAMILIES[family])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def write_checkpoint(directory: Path, family: str, model=None) -> dict:
    """Write the family's model as its public checkpoints are: two shards with an index, multimodal classes with their
    prefix, a vision tensor and an mtp tensor, A_log and gated norm in fp32, experts of qwen3_next one by one.

    Returns the model's state dict.
    """
    import torch
    from safetensors.torch import save_file

    model = model or text_model(family)
    directory.mkdir(parents=True, exist_ok=True)
    state, multimodal = model.state_dict(), family.startswith("qwen3_5")
    stored: dict = {}
    for key, value in state.items():
        if re.search(r"linear_attn\.(A_log|norm\.weight)$", key):
            value = value.float()
        name = re.sub(r"^model\.", "model.language_model.", key) if multimodal else key
        if family == "qwen3_next" and ".experts." in key:
            stored |= _one_by_one(name, value)
        else:
            stored[name] = value.contiguous()
    if multimodal:
        stored |= {"model.visual.patch_embed.proj.weight": torch.zeros(4, 4), "mtp.fc.weight": torch.zeros(4, 8)}
    names = sorted(stored)
    shards = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    for shard, keys in shards.items():
        save_file({key: stored[key] for key in keys}, directory / shard)
    index = {"metadata": {}, "weight_map": {key: shard for shard, keys in shards.items() for key in keys}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = model.config.to_dict()
    if multimodal:
        config = {"model_type": family, "architectures": [f"{family}ForConditionalGeneration"], "text_config": config,
                  "tie_word_embeddings": False}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    return state


def _one_by_one(name: str, value) -> dict:
    """Experts as single matrices: gate_up_proj [E, 2·I, H] is gate_proj over up_proj."""
    stem = name.rpartition(".")[0]
    parts = {}
    for number, matrix in enumerate(value):
        if name.endswith("gate_up_proj"):
            gate, up = matrix.chunk(2)
            parts |= {f"{stem}.{number}.gate_proj.weight": gate, f"{stem}.{number}.up_proj.weight": up}
        else:
            parts[f"{stem}.{number}.down_proj.weight"] = matrix
    return {key: part.contiguous() for key, part in parts.items()}
