"""On a GPU: the fused kernels give PyTorch's own bits, for all values and many sizes, and whole layers do."""

from __future__ import annotations

import shutil

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.numerics(level="fused kernels on a GPU"),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="this machine has no GPU"),
    pytest.mark.filterwarnings("ignore"),  # those of torch and Triton about the machine at hand
]
KINDS = {"norm", "gated norm", "MLP", "convolution", "rotary", "attention", "gated delta net"}


@pytest.fixture(scope="module")
def modeling(gpu):
    from taugate.target.kernels import modeling_module

    return modeling_module("qwen3_5")


@pytest.fixture(scope="module")
def every(gpu):
    """All 65,536 values of bfloat16: signed zeros, subnormals, infinities and NaNs among them."""
    import torch

    return torch.arange(-(2**15), 2**15, device=gpu).to(torch.int16).view(torch.bfloat16)


@pytest.fixture
def draw(gpu):
    """Normal numbers of a shape in bfloat16."""
    import torch

    generator = torch.Generator(gpu).manual_seed(0)
    return lambda *shape: torch.randn(*shape, device=gpu, generator=generator).bfloat16()


def differing(some, others):
    """How many elements differ in any bit; NaNs are all alike, a zero's sign is not."""
    import torch

    assert some.dtype == others.dtype and some.shape == others.shape
    bits = {2: torch.int16, 4: torch.int32}[some.dtype.itemsize]
    same = (some.contiguous().view(bits) == others.contiguous().view(bits)) | (some.isnan() & others.isnan())
    return int((~same).sum())


def test_silu_product_of_every_value(every, draw):
    import torch

    from taugate.target import fused_kernels

    for up in (torch.ones_like(every).view(64, 1024), draw(64, 1024)):
        gate, up = torch.cat([every.view(64, 1024), up], -1).chunk(2, -1)
        assert differing(fused_kernels.silu_product(gate, up), torch.nn.functional.silu(gate) * up) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gated_norm_with_every_value_as_gate(every, draw, modeling, dtype):
    """One of the orders gives the module's own bits, with the weight in the checkpoint's float32 or rounded."""
    import torch

    from taugate.target import fused_kernels

    module = modeling.Qwen3_5RMSNormGated(128).to(every.device, getattr(torch, dtype)).requires_grad_(False)
    module.weight.copy_(1 + 0.1 * draw(128))
    x = draw(512, 128)
    expected = module(x, every.view(512, 128))
    wide = torch.cat([every.view(128, 512), draw(128, 256)], -1)  # four heads, whose rows are spaced
    for gate in (every.view(128, 512), wide[:, :512]):
        found = {
            order: differing(fused_kernels.rms_norm(x, module.weight, module.variance_epsilon, order, gate), expected)
            for order in fused_kernels.ORDERS
        }
        assert 0 in found.values(), found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gates_of_every_value(every, dtype):
    import torch

    from taugate.target import fused_kernels

    x = every[None, :, None].expand(1, -1, 4).contiguous()
    a_log = torch.tensor([-4.6, -0.3, 1.0, 2.77], device=x.device)
    dt_bias = torch.tensor([0.0, -3.1, 0.3, -7.5], device=x.device).to(getattr(torch, dtype))
    decay, beta = fused_kernels.gates(x, x, a_log, dt_bias)
    assert differing(beta, x.sigmoid()) == 0
    expected = -a_log.exp() * torch.nn.functional.softplus(x.float() + dt_bias)
    wrong = decay.view(torch.int32) != expected.view(torch.int32)
    wrong &= ~(decay.isnan() & expected.isnan())
    # Triton's exp flushes subnormal results to zero; a decay of exp(-1e-36) is one either way.
    wrong &= ~((decay.abs() < 1e-36) & (expected.abs() < 1e-36))
    assert not wrong.any(), (int(wrong.sum()), x[wrong][:5], decay[wrong][:5], expected[wrong][:5])


@pytest.mark.parametrize("width", [128, 256, 640, 5120])
def test_norm_in_one_of_the_orders(width, draw, modeling):
    """From the fewest rows that are fused on; one element is so large that each order of summation shows."""
    from taugate.target import fused_kernels

    module = modeling.Qwen3_5RMSNorm(width).to("cuda").bfloat16().requires_grad_(False)
    module.weight.copy_(0.1 * draw(width))
    orders = {}
    for rows in (16, 17, 63, 100, 1000, 1024, 4096):
        x = draw(1, rows, width)
        x[..., 5] *= 30
        expected = module(x)
        found = {
            order: differing(fused_kernels.rms_norm(x, module.weight, module.eps, order), expected)
            for order in fused_kernels.ORDERS
        }
        orders[rows] = found
    assert all(0 in found.values() for found in orders.values()), orders


def test_norm_of_heads_of_a_wider_projection(draw, modeling):
    """As queries lie beside their gates: rows of 256, 512 apart."""
    from taugate.target import fused_kernels

    module = modeling.Qwen3_5RMSNorm(256).to("cuda").bfloat16().requires_grad_(False)
    module.weight.copy_(0.1 * draw(256))
    x = draw(1, 20, 6, 512)[..., :256]
    expected = module(x)
    assert 0 in [
        differing(fused_kernels.rms_norm(x, module.weight, module.eps, order), expected)
        for order in fused_kernels.ORDERS
    ]


def test_convolution_of_16_to_130_tokens(draw):
    """As it lies in the layer, with channels innermost, in three parts and in one: the sum of four products in fp32,
    the oldest token first. That PyTorch's convolution gives these bits is asked for each shape where it is used.
    """
    import torch
    from torch.nn.functional import pad, silu

    from taugate.target import fused_kernels

    weight, wrong = draw(1024, 4), {}
    w = weight.float()
    for tokens in range(16, 131):
        x = draw(tokens, 1280)[:, :1024]
        late = [pad(x.float(), (0, 0, past, 0))[:tokens] for past in (3, 2, 1, 0)]
        total = ((late[0] * w[:, 0] + late[1] * w[:, 1]) + late[2] * w[:, 2]) + late[3] * w[:, 3]
        expected = silu(total.bfloat16())
        parts = fused_kernels.convolution(x, weight, 256)
        whole = fused_kernels.convolution(x, weight)[2]
        if counts := [n for n in (differing(torch.cat(parts, 1), expected), differing(whole, expected)) if n]:
            wrong[tokens] = counts
    assert not wrong


@pytest.mark.parametrize("tokens", [1, 20, 1000])
def test_rotary(tokens, draw, modeling):
    """64 of 256 elements are turned; attention gets what it got, in the same layout."""
    from taugate.target import fused_attention

    q, k = (draw(1, tokens, heads, 256).transpose(1, 2) for heads in (24, 4))
    cos, sin = (draw(1, tokens, 64).clamp(-1, 1) for _ in range(2))
    for x, expected in zip((q, k), modeling.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        found = fused_attention.rotary(x, cos, sin)
        assert differing(found, expected) == 0 and found.stride() == expected.stride()


def test_gate_of_every_value(every, draw):
    """As gates lie beside the queries; the attention's output as its heads or its tokens lie together."""
    import torch

    from taugate.target import fused_attention

    gate = torch.cat([draw(1, 64, 4, 256), every.view(1, 64, 4, 256)], -1)[..., 256:]
    for out in (draw(1, 4, 64, 256), draw(1, 64, 4, 256).transpose(1, 2)):
        expected = out.transpose(1, 2) * gate.sigmoid()
        found = fused_attention.gated(out, gate)
        assert differing(found, expected) == 0 and found.is_contiguous()


def one_buffer(first, second):
    """The weights of two linear layers, one behind the other in memory, as a streamed layer's lie."""
    import torch

    both, rows = torch.cat([first.weight, second.weight]), len(first.weight)
    first.weight.data, second.weight.data = both[:rows], both[rows:]


@pytest.mark.parametrize("joined", [False, True], ids=["apart", "joined"])
def test_layers_keep_their_bits(joined, gpu, evidence):
    """A Gated DeltaNet and an attention layer of a 27B on fla's path, three times: compared first, then fused alone.

    Each kind is used: where the product of joined weights has other bits, it is made of two.
    """
    import torch

    from taugate.target.fused import Fused, fused_modules
    from taugate.target.kernels import kernel_path
    from taugate.target.random_model import FULL, LINEAR, SHAPE_27B, random_model

    model = random_model(SHAPE_27B | {"layer_types": [LINEAR, FULL]}, 1, "bfloat16", gpu).model
    model.layers[0].linear_attn.norm.float()  # as checkpoints store it
    if joined:
        for layer in model.layers:
            one_buffer(layer.mlp.gate_proj, layer.mlp.up_proj)
        mixer = model.layers[0].linear_attn
        one_buffer(mixer.in_proj_qkv, mixer.in_proj_z)
        one_buffer(mixer.in_proj_a, mixer.in_proj_b)
    generator = torch.Generator(gpu).manual_seed(2)
    prompts = [torch.randint(0, 256, (1, n), device=gpu, generator=generator) for n in (5, 16, 100, 700)]

    def states():
        with torch.inference_mode():
            return [model(ids, use_cache=False).last_hidden_state for ids in prompts]

    fused = Fused()
    with kernel_path("fla", "qwen3_5_text", gpu) as ran:
        expected = states()
        with fused_modules(fused, "qwen3_5_text"):
            for _ in range(3):
                for found, own in zip(states(), expected, strict=True):
                    assert found.isfinite().all() and differing(found, own) == 0
    facts = fused.facts()
    assert "refused" not in facts and set(facts["used"]) >= KINDS, facts
    calls = ran.require()["calls"]
    assert "torch_chunk_gated_delta_rule <- fla.ops.gated_delta_rule.chunk" in calls
    assert calls["causal_conv1d_fn <- taugate.target.fused_kernels"] > 0, "what really ran is in the evidence"
    what = "fused layers, the modules' own" + (", products joined" if joined else "")
    evidence.add({"type": "agreement", "level": "fused kernels on a GPU", "what": what, "error": 0.0})
