"""Whole models on a GPU: layers at the sizes of a 27B, and prefill in parts with decoding at those sizes."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.gpu]
numerics = pytest.mark.numerics
SEED = 500


@pytest.fixture(scope="module")
def big(gpu):
    """Four layers of the 27B shape in bfloat16, and their reference."""
    import torch

    from taugate.target.random_model import SHAPE_27B, random_model
    from taugate.target.reference import Reference

    model = random_model(SHAPE_27B, SEED, "bfloat16", gpu)
    yield model, Reference.from_model(model)
    torch.cuda.empty_cache()


def compared(big, kernels, batches):
    from taugate.target.levels import Comparison
    from taugate.target.paths import PATHS, on_path

    model, reference = big
    found = {}
    for path in PATHS:
        found[path] = Comparison(reference, model, path)
        with on_path(model, path, kernels, "bf16"):
            for batch in batches:
                exact = found[path].exact(batch)
                found[path].add(batch, exact)
                found[path].add_layers(batch, exact)
    return found


@numerics(level="layer")
def test_layers_of_27b_alone_and_in_a_row(big, kernels, budgets, evidence):
    """1000 tokens, a number that no chunk divides."""
    import torch

    from taugate.target.agreement import judge_level, judge_ratio
    from taugate.target.levels import Batch

    ids = torch.randint(1, 1024, (1, 1000), generator=torch.Generator().manual_seed(SEED)).tolist()
    found = compared(big, kernels, [Batch(ids)])
    agreements = [a for path in found for a in judge_level(found[path], "layer", budgets, "27B shape")]
    fla, torch_path = found["fla"].result(), found["torch"].result()
    agreements += judge_ratio(fla, torch_path, budgets, "27B shape")
    for agreement in agreements:
        evidence.add(agreement.record())
    for divergence in (torch_path, fla):
        evidence.add(divergence.record("27B shape, 4 layers"))
    assert not [str(agreement) for agreement in agreements if not agreement.ok]


@numerics(level="propagated")
@pytest.mark.parametrize("path", ["torch", "fla"])
def test_three_runs_of_27b_layers_give_the_same_bits(path, big, kernels, evidence):
    import torch

    from taugate.numerics.measures import repeatable
    from taugate.target.paths import on_path
    from taugate.target.trace import trace

    ids = torch.randint(1, 1024, (1, 300), generator=torch.Generator().manual_seed(SEED)).tolist()
    with on_path(big[0], path, kernels, "bf16"):
        assert repeatable(lambda: trace(big[0], ids).outputs, times=3)
    evidence.add({"type": "agreement", "level": "propagated", "what": "3 runs bit-equal", "path": path, "layers": 4})


@numerics(level="propagated")
def test_prefill_in_parts_and_decoding_at_27b(big, kernels, budgets, evidence):
    """300 tokens in two parts and eight one by one are as near to float64 as the layers in one go."""
    import torch

    from taugate.target.agreement import judge_ratio
    from taugate.target.levels import Batch

    ids = torch.randint(1, 1024, (1, 308), generator=torch.Generator().manual_seed(SEED)).tolist()
    found = compared(big, kernels, [Batch(ids, pieces=(200, 100, *(1 for _ in range(8))))])
    agreements = judge_ratio(found["fla"].result(), found["torch"].result(), budgets, "27B shape, decode")
    for agreement in agreements:
        evidence.add(agreement.record())
    assert not [str(agreement) for agreement in agreements if not agreement.ok]
