"""The yardstick itself: a whole target in float64 that never leaves float64, judged by 40-digit arithmetic."""

from __future__ import annotations

import pytest

from fixtures.shipped import PAIR

HYBRID = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 6, "intermediate_size": 5, "vocab_size": 7, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4, "rms_norm_eps": 1e-6, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 3, "linear_value_head_dim": 2, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
FULL = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 6, "intermediate_size": 5, "vocab_size": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
IDS = [3, 1, 4, 1, 5, 2]


@pytest.fixture(scope="module")
def fp32_model():
    """The tiny trained target in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()


def drawn(config, seed=0):
    """Weights of a model of `config` by name: normal draws in float64, none of them representable in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    generator = torch.Generator().manual_seed(seed)
    shapes = {name.removeprefix("model."): value.shape for name, value in model.state_dict().items()}
    draws = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    return {n: 0.5 * x if n.endswith(("norm.weight", "A_log", "dt_bias")) else 0.7 * x for n, x in draws.items()}


def reference(config, weights):
    from taugate.target.reference import Reference
    from taugate.target.reference_layers import Shape

    return Reference(Shape.read(config), list(weights), weights.__getitem__)


@pytest.mark.parametrize("config", [HYBRID, FULL], ids=["qwen3_5", "qwen3"])
def test_reference_equals_forty_digit_arithmetic(config):
    """Relative error below 1e-13 at every layer: one cast to float32 anywhere would leave 1e-8 or more."""
    from mpmath import mpf

    from tests_numerics import high_precision

    weights = drawn(config)
    rope = config["rope_parameters"]
    facts = {
        "hybrid": config["model_type"] != "qwen3", "layers": config["num_hidden_layers"], "eps": mpf(1e-6),
        "heads": config["num_attention_heads"], "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"], "theta": rope["rope_theta"],
        "rotary": int(config["head_dim"] * rope.get("partial_rotary_factor", 1)),
        "key_heads": config.get("linear_num_key_heads"), "value_heads": config.get("linear_num_value_heads"),
        "key_dim": config.get("linear_key_head_dim"), "value_dim": config.get("linear_value_head_dim"),
    }  # fmt: skip
    exact = {name: high_precision.numbers(value) for name, value in weights.items()}
    outputs, final, logits = high_precision.forward(IDS, exact, facts)
    found = reference(config, weights)([IDS])
    for what, ours, theirs in (
        *((f"layer {i}", found.outputs[i], outputs[i]) for i in range(config["num_hidden_layers"])),
        ("final hidden", found.final_hidden, final),
        ("logits", found.logits, logits),
    ):
        rows = zip(theirs, ours[0], strict=True)
        pairs = [(a, mpf(float(b))) for row, got in rows for a, b in zip(row, got, strict=True)]
        error = (sum((a - b) ** 2 for a, b in pairs) / sum(a * a for a, _ in pairs)) ** 0.5
        assert float(error) < 1e-13, what


@pytest.mark.parametrize("config", [HYBRID, FULL], ids=["qwen3_5", "qwen3"])
def test_no_operation_of_the_reference_is_narrower_than_float64(config):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    narrow = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            tensors = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
            narrow.extend(str(function) for x in tensors if x.is_floating_point() and x.dtype != torch.float64)
            return out

    weights = drawn(config)
    yardstick = reference(config, weights)
    with Watch():
        yardstick([IDS], torch.tensor([[0, 1, 1, 1, 1, 1]]))
    assert not narrow


def test_a_model_in_double_is_no_reference(fp32_model):
    """transformers' own float64 forward carries float32 casts: it is as far off as a float32 model, not 1e-13."""
    import copy

    import torch

    from taugate.numerics.measures import relative_error
    from taugate.target.kernels import kernel_path
    from taugate.target.reference import Reference
    from taugate.target.trace import trace

    ids = [list(range(100, 140))]
    exact = Reference.from_model(fp32_model)(ids)
    with kernel_path("torch", "qwen3_5_text", "cpu"):
        double = trace(copy.deepcopy(fp32_model).double(), ids)
    assert double.final_hidden.dtype == torch.float64
    assert 1e-8 < relative_error(double.final_hidden, exact.final_hidden) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_change_nothing_in_the_reference(side):
    import torch

    weights = drawn(HYBRID)
    yardstick = reference(HYBRID, weights)
    alone = yardstick([IDS]).logits[0]
    pads = [6, 6, 6]
    ids, mask = (pads + IDS, [0] * 3 + [1] * 6) if side == "left" else (IDS + pads, [1] * 6 + [0] * 3)
    padded = yardstick([ids], torch.tensor([mask])).logits[0][torch.tensor(mask).bool()]
    assert float((padded - alone).norm() / alone.norm()) < 1e-13


def test_long_sequences_are_attended_to_in_blocks(monkeypatch):
    """Queries are taken a few at a time; the result does not depend on how many."""
    import torch

    from taugate.target import reference_layers

    yardstick = reference(FULL, drawn(FULL))
    whole = yardstick([IDS]).logits
    monkeypatch.setattr(reference_layers, "_QUERIES_AT_ONCE", 2)
    assert torch.allclose(yardstick([IDS]).logits, whole, rtol=0, atol=1e-13)


def test_unknown_computations_are_refused():
    from taugate.errors import CheckpointError
    from taugate.target.reference_layers import Shape

    with pytest.raises(CheckpointError, match="not 'llama'"):
        Shape.read({**FULL, "model_type": "llama"})
    with pytest.raises(CheckpointError, match="plain rotary embedding"):
        Shape.read({**FULL, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}})
    with pytest.raises(CheckpointError, match="sliding windows"):
        Shape.read({**FULL, "layer_types": ["sliding_attention", "full_attention"]})
