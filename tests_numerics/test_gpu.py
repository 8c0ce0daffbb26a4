"""What only a GPU can run: 32k tokens and 48 heads, in the configurations that fla's autotuner chooses there, and the
layer of a 27B model."""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # those of torch and Triton about the machine at hand
]
numerics = pytest.mark.numerics
SEED = 500


@pytest.fixture(scope="module")
def heads_27b(gpu):
    """16 k heads for 48 v heads of 128: sizes of the linear layers of Qwen3.5 and Qwen3.6-27B."""
    return {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128}


@pytest.fixture(scope="module")
def long_inputs(heads_27b, gpu):
    """32k tokens with the long memory of few decays, and what float64 makes of them."""
    from taugate.numerics.cases import Case, expected

    case = Case("32768 tokens, 48 heads of 128", 32768, "long", **heads_27b)
    inputs = case.inputs("bf16", SEED, gpu)
    return case, inputs, expected(case, inputs)


@numerics(level="core")
@pytest.mark.parametrize("path", ["fla-chunk", "fla-recurrent", "torch-chunk"])
def test_32k_tokens_in_48_heads(path, long_inputs, budgets, evidence):
    from taugate.numerics.agreement import judge, measure
    from taugate.numerics.kernels import call

    case, inputs, want = long_inputs
    found = judge(measure(*call(path, inputs), *want), budgets, "core", "bf16", path, case.name)
    for agreement in found:
        evidence.add(agreement.record())
    assert not [str(agreement) for agreement in found if not agreement.ok]


@numerics(level="core")
@pytest.mark.parametrize("path", ["fla-chunk", "fla-recurrent"])
def test_ten_runs_of_48_heads_give_the_same_bits(path, heads_27b, gpu, evidence):
    from taugate.numerics.cases import Case
    from taugate.numerics.kernels import call
    from taugate.numerics.measures import repeatable

    inputs = Case("2048 tokens", 2048, **heads_27b).inputs("bf16", SEED, gpu)
    assert repeatable(lambda: call(path, inputs), times=10)
    evidence.add({"type": "agreement", "level": "core", "what": "10 runs bit-equal on the GPU", "path": path})


@numerics(level="layer")
@pytest.mark.parametrize("family", ["fla", "torch"])
def test_the_layer_of_a_27b_model(family, gpu, kernels, budgets, evidence):
    from taugate.numerics.agreement import judge, measure, path_runner
    from taugate.numerics.layer import LayerCase, build, expected_layer, run_layer
    from taugate.numerics.reference import GdnShape

    case = LayerCase("2048 tokens, hidden 5120", 2048, hidden=5120, shape=GdnShape(16, 48, 128, 128))
    layer = build(case, "bf16", SEED, gpu)
    paths = [path_runner(kernels, f"{family}-{kind}", "bf16") for kind in ("chunk", "recurrent")]
    errors = measure(run_layer(case, layer, *paths), None, expected_layer(case, layer), None)
    found = judge(errors, budgets, "layer", "bf16", family, case.name)
    for agreement in found:
        evidence.add(agreement.record())
    assert not [str(agreement) for agreement in found if not agreement.ok]
