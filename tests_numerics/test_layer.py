"""The whole Gated DeltaNet layer of transformers with its core on either path, against the float64 layer."""

from __future__ import annotations

import pytest

numerics = pytest.mark.numerics
SEED = 500


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def measured(kernels):
    """Errors by family and dtype, for each case."""
    from taugate.numerics.agreement import measure, path_runner
    from taugate.numerics.layer import LAYER_CASES, build, expected_layer, run_layer

    known = {}

    def run(family, dtype):
        if (family, dtype) not in known:
            paths = [path_runner(kernels, f"{family}-{kind}", dtype) for kind in ("chunk", "recurrent")]
            errors = known[family, dtype] = {}
            for case in LAYER_CASES:
                layer = build(case, dtype, SEED, kernels.device)
                errors[case.name] = measure(run_layer(case, layer, *paths), None, expected_layer(case, layer), None)
        return known[family, dtype]

    return run


@numerics(level="layer")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["torch", "fla"])
def test_errors_are_within_their_budgets(family, dtype, measured, budgets, evidence):
    from taugate.numerics.agreement import judge, worst

    found = [
        agreement
        for case, errors in measured(family, dtype).items()
        for agreement in judge(errors, budgets, "layer", dtype, family, case)
    ]
    for agreement in worst(found):
        evidence.add(agreement.record())
    assert not [str(agreement) for agreement in found if not agreement.ok]


@numerics(level="layer")
def test_fla_is_not_much_worse_than_the_fallback(measured, budgets, evidence):
    from taugate.numerics.agreement import worst
    from taugate.numerics.budgets import check
    from taugate.numerics.measures import error_ratio

    budget = budgets.find("layer", "output", "bf16", "fla/torch")
    fla, fallback = measured("fla", "bf16"), measured("torch", "bf16")
    found = [
        check(error_ratio(fla[case].errors["output"], fallback[case].errors["output"]), budget, case)
        for case in fallback
    ]
    evidence.add(worst(found)[0].record())
    assert not [str(agreement) for agreement in found if not agreement.ok]


def test_a_layer_whose_core_is_bound_elsewhere_is_noticed():
    """If a release of transformers calls another function, nothing would be tested, and nobody would know."""
    from taugate.errors import EvidenceError
    from taugate.numerics.layer import core_on

    with pytest.raises(EvidenceError, match="without calling a gated delta rule"), core_on(None, None):
        pass
