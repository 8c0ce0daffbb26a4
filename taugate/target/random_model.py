"""Hybrid targets with random weights, for what needs sizes rather than sense: small ones, and the shape of a 27B.

Drawn as such models are initialised, but with the decay of Mamba's initialisation (time steps log-uniform between 1e-3
and 1e-1) and convolutions that mix, so that states live as long as those of trained models. A_log and dt_bias are
float32 numbers that bfloat16 cannot hold, as checkpoints of the family store them.
"""

from __future__ import annotations

from typing import Any

LINEAR, FULL = "linear_attention", "full_attention"
SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "layer_types": [LINEAR, FULL, LINEAR],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
"""Cheap enough for the interpreter: two Gated DeltaNet layers around one of attention."""
SHAPE_27B: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 5120, "intermediate_size": 17408, "layer_types": [LINEAR] * 3 + [FULL],
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
"""Layers of Qwen3.6-27B: 48 heads of 128; its vocabulary is left out. Four layers; repeat `layer_types` for more."""


def random_model(sizes: dict[str, Any], seed: int = 0, dtype: str = "float32", device: str = "cpu") -> Any:
    """A Qwen3_5ForCausalLM of `sizes` (SMALL, SHAPE_27B or any), in evaluation mode."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = Qwen3_5TextConfig(
        **sizes, num_hidden_layers=len(sizes["layer_types"]), rope_parameters=rope, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    low = getattr(torch, dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(low)
    try:
        with torch.device(device):
            model = Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    draw = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter, draw)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.data, layer.linear_attn.dt_bias.data = _decay(layer.linear_attn.num_v_heads, draw)
    return model.eval().requires_grad_(False)


def _draw(name: str, parameter: Any, draw: Any) -> None:
    if parameter.dim() == 1:  # norms, which scale by 1 + w, but the gated one by w
        parameter.normal_(1.0 if name.endswith("linear_attn.norm.weight") else 0.0, 0.1, generator=draw)
    elif "conv1d" in name:
        parameter.normal_(0, 0.3, generator=draw)
    else:
        parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5, generator=draw)


def _decay(heads: int, draw: Any) -> tuple[Any, Any]:
    """(A_log, dt_bias) in float32: A uniform in [0.5, 16], softplus(dt_bias) log-uniform in [1e-3, 1e-1]."""
    import torch

    rate, step = torch.rand(2, heads, generator=draw, device=draw.device)
    step = 1e-3 * 100**step
    return (0.5 + 15.5 * rate).log(), step + (-torch.expm1(-step)).log()
