"""Each path of the gated delta rule against the float64 reference: lengths around chunk borders, decay regimes, small
q and k, grouped heads, initial states, packing, padding, prefill in parts. fla's kernels are the real ones: interpreted
on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest

numerics = pytest.mark.numerics
SEED = 500  # budgets were set on seeds below 30


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def measured(kernels):
    """Errors by (path, dtype) and case, each path run once."""
    from taugate.numerics.agreement import core, path_runner
    from taugate.numerics.cases import core_cases, recurrent_cases

    known = {}

    def run(path, dtype):
        if (path, dtype) not in known:
            cases = recurrent_cases if path == "fla-recurrent" else core_cases
            known[path, dtype] = {
                case.name: core(case, path_runner(kernels, path, dtype), dtype, SEED, kernels.device)
                for case in cases(packed=path.startswith("fla"))
            }
        return known[path, dtype]

    return run


PATHS = [
    (path, dtype)
    for path in ("torch-chunk", "torch-recurrent", "fla-chunk", "fla-recurrent")
    for dtype in ("fp32", "bf16")
]


@numerics(level="core")
@pytest.mark.parametrize(("path", "dtype"), [*PATHS, ("fla-chunk", "tf32")])
def test_errors_are_within_their_budgets(path, dtype, measured, budgets, evidence):
    from taugate.numerics.agreement import judge, worst

    found = [
        agreement
        for case, errors in measured(path, dtype).items()
        for agreement in judge(errors, budgets, "core", dtype, path, case)
    ]
    cosine = max(errors.cosine_gap for errors in measured(path, dtype).values())
    for agreement in worst(found):
        evidence.add(agreement.record() | ({"cosine_gap": cosine} if agreement.budget.what == "output" else {}))
    assert not [str(agreement) for agreement in found if not agreement.ok]


@numerics(level="core")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fla_is_not_much_worse_than_the_fallback(dtype, measured, budgets, evidence):
    """The ratio of their errors against the reference, case by case: what one path alone gets wrong stands out."""
    from taugate.numerics.agreement import worst
    from taugate.numerics.budgets import check
    from taugate.numerics.measures import error_ratio

    budget = budgets.find("core", "output", dtype, "fla-chunk/torch-chunk")
    fla, torch_path = measured("fla-chunk", dtype), measured("torch-chunk", dtype)
    found = [
        check(error_ratio(fla[case].errors["output"], torch_path[case].errors["output"]), budget, case)
        for case in torch_path
    ]
    evidence.add(worst(found)[0].record())
    assert not [str(agreement) for agreement in found if not agreement.ok]


@numerics(level="core")
@pytest.mark.parametrize("path", ["fla-chunk", "fla-recurrent", "torch-chunk"])
def test_three_runs_give_the_same_bits(path, kernels, evidence):
    """Races between warps show as results that change from run to run (fla #945, #1228)."""
    from taugate.numerics.cases import Case
    from taugate.numerics.measures import repeatable

    case = Case("40 tokens", 40 if path.endswith("chunk") else 10, value_heads=1, key_dim=32, value_dim=32)
    inputs = case.inputs("bf16", SEED, kernels.device)
    assert repeatable(lambda: kernels.run(path, inputs))
    evidence.add({"type": "agreement", "level": "core", "what": "3 runs bit-equal", "path": path, "dtype": "bf16"})


@numerics(level="core")
def test_the_kernel_that_ran_is_flas(kernels):
    """Nothing that calls itself fla is the fallback: its output differs from the fallback's, in the last bits."""
    import torch

    from taugate.numerics.cases import Case

    inputs = Case("40 tokens", 40, value_heads=1).inputs("bf16", SEED, kernels.device)
    before = kernels.launches
    out, state = kernels.run("fla-chunk", inputs)
    assert sum(kernels.launches.values()) > sum(before.values())
    assert not torch.equal(state, kernels.run("torch-chunk", inputs)[1])
    if kernels.device == "cpu":
        ran = kernels.launches - before
        assert {"chunk_gated_delta_rule_fwd_kkt_solve_kernel", "chunk_fwd_kernel_o"} <= set(ran)


@numerics(level="core")
def test_right_padding_decays_the_state_on_either_path(kernels):
    """Known and documented: a cache that was filled with right padding is wrong, whoever filled it."""
    from dataclasses import replace

    from taugate.numerics.cases import Case, expected, pad
    from taugate.numerics.measures import relative_error

    case = Case("40 tokens", 40, "long", value_heads=1)
    inputs = case.inputs("fp32", SEED, kernels.device)
    state = expected(case, inputs)[1]
    for path in ("fla-chunk", "torch-chunk"):
        assert relative_error(kernels.run(path, inputs, "fp32")[1], state) < 1e-5
        assert relative_error(kernels.run(path, replace(pad(inputs, 0, 24)), "fp32")[1], state) > 0.1


def test_a_gpu_that_is_not_there_is_one_sentence(monkeypatch):
    import torch

    from taugate.errors import KernelPathError
    from taugate.numerics.kernels import open_kernels

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelPathError, match='to run on "cuda", but torch finds no GPU'), open_kernels("cuda"):
        pass
