"""Attention to all nodes of a graph, exact and at linear cost, alone and in batches."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn import dense_attention, patterns
from graphattn.nn import GraphMultiheadAttention, global_attention, linear_cost
from graphattn.nn.global_attention import (
    GlobalAttention,
    LinformerAttention,
    PerformerAttention,
    ReformerAttention,
)
from graphattn.nn.linear_cost import linear_attention
from parity import BACKENDS, assert_equal_to, leaf

EXACT = {"rtol": 1e-10, "atol": 1e-10}
# 12 channels in 3 heads, graphs of up to 400 nodes.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "exact": lambda: GlobalAttention(12, 3),
    "exact, no bias": lambda: GlobalAttention(12, 3, bias=False),
    "performer": lambda: PerformerAttention(12, 3),
    "performer, no bias": lambda: PerformerAttention(12, 3, 5, bias=False),
    "performer, causal": lambda: PerformerAttention(12, 3, causal=True),
    "linformer": lambda: LinformerAttention(12, 3, 400, projected_length=7),
    "linformer, not shared": lambda: LinformerAttention(
        12, 3, 400, projected_length=7, shared=False
    ),
    "linformer, per head": lambda: LinformerAttention(
        12, 3, 400, projected_length=7, per_head=True, bias=False
    ),
    "linformer, neither": lambda: LinformerAttention(
        12, 3, 400, projected_length=7, shared=False, per_head=True
    ),
    "reformer": lambda: ReformerAttention(12, 3, bucket_size=4),
    "reformer, causal": lambda: ReformerAttention(12, 3, bucket_size=4, causal=True, bias=False),
    "reformer, chunks": lambda: ReformerAttention(12, 3, bucket_size=4, num_hashes=2, chunk=4),
    "reformer, not shared": lambda: ReformerAttention(12, 3, bucket_size=4, shared_qk=False),
    "reformer, not shared, causal": lambda: ReformerAttention(
        12, 3, bucket_size=4, num_hashes=1, shared_qk=False, causal=True, chunk=3
    ),
}
CAUSAL = ["performer, causal", "reformer, causal", "reformer, not shared, causal"]


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """One of them, with biases that are not zero."""
    layer = LAYERS[name]().to(dtype).eval()
    with torch.no_grad():
        for parameter, value in layer.named_parameters():
            if "bias" in parameter:
                value.normal_()
    return layer


def exact_layer(embed_dim: int = 12, heads: int = 3, **options: Any) -> GlobalAttention:
    layer = GlobalAttention(embed_dim, heads, **options).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


def run(layer: nn.Module, x: Tensor, batch: Tensor | None, weight: Tensor) -> dict[str, Tensor]:
    """Output, and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    out = layer(x, batch)
    names = ["x", *(name for name, _ in layer.named_parameters())]
    gradients = torch.autograd.grad((out * weight).sum(), [x, *layer.parameters()])
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


# Batches ##########################################################################################


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("length", [[3, 50], [2, 0, 131, 1, 300, 7]], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_c75_a_graph_is_the_same_alone_and_beside_larger_ones(
    name: str, length: list[int], dtype: torch.dtype
) -> None:
    layer = make(name, dtype)
    batch = patterns.batch_vector(length)
    x, weight = torch.randn(2, batch.numel(), 12, dtype=dtype)
    # The mates have numbers of another size, which must not be felt.
    x = x * torch.tensor([1.0, 3.0, 0.1])[batch % 3].to(dtype).unsqueeze(1)
    together = run(layer, x, batch, weight)
    alone = [
        run(layer, x[batch == graph], None, weight[batch == graph])
        for graph in range(len(length))
        if length[graph] > 0
    ]
    for part in together:
        parts = [of_graph[part] for of_graph in alone]
        whole = torch.cat(parts) if part in ("out", "x") else torch.stack(parts).sum(0)
        size = max(1.0, whole.abs().max().item())
        tolerance = 1e-10 if dtype == torch.float64 else (1e-6 if part == "out" else 1e-5)
        torch.testing.assert_close(
            together[part], whole, rtol=0, atol=tolerance * size, msg=lambda m, p=part: f"{p}: {m}"
        )


@pytest.mark.parametrize("name", LAYERS)
def test_c38_nodes_attend_within_their_graph_only(name: str) -> None:
    layer = make(name)
    x = torch.randn(6, 12, dtype=torch.float64)
    batch = torch.tensor([0, 0, 0, 1, 1, 1])
    other = x.clone()
    other[3:] = torch.nan
    assert torch.equal(layer(other, batch)[:3], layer(x, batch)[:3])
    assert layer(other, batch)[3:].isnan().any()
    assert torch.equal(layer(x), layer(x, torch.zeros(6, dtype=torch.int64)))
    assert not torch.allclose(layer(x, batch)[3:], layer(x)[3:])


@pytest.mark.parametrize("name", LAYERS)
def test_no_nodes_and_graphs_of_one(name: str) -> None:
    layer = make(name)
    for batch in (None, torch.empty(0, dtype=torch.int64)):
        x = leaf(0, 12)
        out = layer(x, batch)
        assert out.shape == (0, 12)
        out.sum().backward()
        assert x.grad.shape == (0, 12)
    # Beside them, numbers of graphs that have no nodes.
    x, batch = torch.randn(4, 12, dtype=torch.float64), torch.tensor([0, 3, 5, 6])
    out = layer(x, batch)
    torch.testing.assert_close(out, torch.cat([layer(row) for row in x.split(1)]), **EXACT)
    if not isinstance(layer, LinformerAttention):
        value = layer._project(x)[-1].transpose(0, 1).flatten(1)
        torch.testing.assert_close(out, layer.out_proj(value), **EXACT)


@pytest.mark.parametrize("name", LAYERS)
def test_c51_every_parameter_gets_a_gradient(name: str) -> None:
    layer = make(name).train()
    layer(torch.randn(30, 12).double(), patterns.batch_vector([20, 10])).square().sum().backward()
    for parameter, value in layer.named_parameters():
        assert value.grad is not None, parameter
        # A key's bias adds the same to all scores of a query, so its gradient is zero up to
        # rounding.
        assert value.grad.abs().max() > 1e-12, parameter


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_layers_see_nothing_that_comes_after(name: str) -> None:
    layer = make(name)
    x = torch.randn(300, 12, dtype=torch.float64)
    changed = x.clone()
    changed[200:] *= 1000.0
    chunk = getattr(layer, "chunk", None)
    if isinstance(layer, ReformerAttention):
        layer.bucket_size, layer.chunk = 1000, None  # hashes and chunks are of the whole sequence
    assert torch.equal(layer(changed)[:200], layer(x)[:200])
    assert not torch.allclose(layer(changed)[200:], layer(x)[200:])
    assert chunk in (None, 3)


# Linear attention #################################################################################


def quadratic(query: Tensor, key: Tensor, value: Tensor, batch: Tensor, causal: bool) -> Tensor:
    """Linear attention by its definition, over all pairs."""
    weights = torch.einsum("ihm,jhm->hij", query, key)
    allowed = batch.unsqueeze(1) == batch
    allowed = allowed.tril() if causal else allowed
    weights = weights * allowed
    return torch.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdim=True), value)


def features(num_nodes: int, heads: int = 2, count: int = 5, value_dim: int = 3) -> list[Tensor]:
    query, key = torch.rand(2, num_nodes, heads, count, dtype=torch.float64) + 0.01
    value = torch.randn(num_nodes, heads, value_dim, dtype=torch.float64)
    return [x.requires_grad_() for x in (query, key, value)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [[1], [5, 0, 9], [129], [300, 1, 2, 128, 257]], ids=str)
def test_linear_attention_equals_the_quadratic_form(length: list[int], causal: bool) -> None:
    tensors, batch = features(sum(length)), patterns.batch_vector(length)
    out = linear_attention(*tensors, batch=batch, causal=causal)
    expected = quadratic(*tensors, batch, causal)
    torch.testing.assert_close(out, expected, **EXACT)
    weight = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad((out * weight).sum(), tensors),
        torch.autograd.grad((expected * weight).sum(), tensors),
        **EXACT,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_has_exact_derivatives(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_cost, "_BLOCK", 2)
    batch = torch.tensor([0, 0, 0, 0, 0, 2, 2])

    def attend(*tensors: Tensor) -> Tensor:
        return linear_attention(*tensors, batch=batch, causal=causal)

    tensors = features(7, heads=1, count=2, value_dim=2)
    assert torch.autograd.gradcheck(attend, tensors)
    assert torch.autograd.gradgradcheck(attend, tensors)


def test_linear_causal_attention_is_a_recurrence() -> None:
    query, key, value = features(150)
    total, norm, outputs = torch.zeros(2, 5, 3).double(), torch.zeros(2, 5).double(), []
    for q, k, v in zip(query, key, value, strict=True):
        total, norm = total + k.unsqueeze(-1) * v.unsqueeze(-2), norm + k
        outputs.append((q.unsqueeze(-1) * total).sum(1) / (q * norm).sum(1, keepdim=True))
    out = linear_attention(query, key, value, causal=True)
    torch.testing.assert_close(out, torch.stack(outputs), **EXACT)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_of_nothing_is_zero(causal: bool) -> None:
    query, key, value = features(4)
    query = query.detach().clone()
    query[1] = 0.0
    out = linear_attention(query, key, value, causal=causal)
    assert (out[1] == 0.0).all()
    assert (out[[0, 2, 3]] != 0.0).all()
    assert linear_attention(*features(0), causal=causal).shape == (0, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_c76_linear_attention_sums_in_float32(causal: bool, dtype: torch.dtype) -> None:
    # The divisor of 3,000 nodes is far beyond the largest number of float16.
    ones = torch.full((3000, 1, 16), 4.0, dtype=dtype)
    value = torch.linspace(0, 1, 3000, dtype=dtype).view(-1, 1, 1)
    for x in (ones, ones.float()):
        with torch.autocast("cpu", dtype=dtype, enabled=x.dtype == torch.float32):
            out = linear_attention(x, x, value, causal=causal)
        assert out.dtype == x.dtype
        exact = value.double().flatten().cumsum(0) / torch.arange(1, 3001)
        exact = exact if causal else exact[-1:].expand(3000)
        torch.testing.assert_close(
            out.double().flatten(), exact, rtol=0, atol=torch.finfo(out.dtype).eps + 1e-6
        )


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_costs_no_pairs(causal: bool) -> None:
    length = [1500, *[1] * 200]
    tensors, batch = features(sum(length), count=8, value_dim=8), patterns.batch_vector(length)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        linear_attention(*tensors, batch=batch, causal=causal)
    rows = 4 * sum(length)  # with what fills blocks up
    assert max(x.numel() for x in saved) <= rows * 2 * max(9, linear_cost._BLOCK * causal)
    assert sum(x.numel() for x in saved) <= 40 * rows * 2 * 9


# Exact layer ######################################################################################


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
def test_exact_layer_equals_torch_on_each_graph(bias: bool, backend: str) -> None:
    theirs = nn.MultiheadAttention(12, 3, bias=bias, dtype=torch.float64)
    ours = GlobalAttention.from_exact(theirs, backend=backend)
    x, length = leaf(10, 12), [4, 1, 5]
    out = ours(x, patterns.batch_vector(length))
    expected = torch.cat([theirs(part, part, part)[0] for part in x.split(length)])
    assert_equal_to(out, expected)
    weight = torch.randn_like(out)
    ours_grad = torch.autograd.grad((out * weight).sum(), [x, *ours.parameters()])
    theirs_grad = torch.autograd.grad((expected * weight).sum(), [x, *theirs.parameters()])
    for actual, wanted in zip(ours_grad, theirs_grad, strict=True):
        assert_equal_to(actual, wanted)


# Weights of an exact layer ########################################################################

FROM_EXACT: dict[str, Callable[[Any], nn.Module]] = {
    "exact": GlobalAttention.from_exact,
    "performer": lambda exact: PerformerAttention.from_exact(exact, num_features=7, causal=True),
    "linformer": lambda exact: LinformerAttention.from_exact(exact, 20, shared=False),
    "reformer": lambda exact: ReformerAttention.from_exact(exact, bucket_size=4, num_hashes=2),
}


@pytest.mark.parametrize("name", FROM_EXACT)
def test_c49_weights_of_every_exact_layer_load(name: str) -> None:
    for bias in (True, False):
        for exact in (
            GlobalAttention(12, 3, 0.25, bias),
            GraphMultiheadAttention(12, 3, 0.25, bias),
            nn.MultiheadAttention(12, 3, 0.25, bias),
        ):
            exact = exact.to(torch.bfloat16).eval()
            layer = FROM_EXACT[name](exact)
            assert layer.out_proj.weight.dtype == torch.bfloat16
            assert not layer.training
            assert getattr(layer, "dropout", 0.25) == 0.25
            own = dict(layer.named_parameters())
            for parameter, value in exact.named_parameters():
                assert torch.equal(own[parameter], value), parameter
                assert own[parameter] is not value
            # A layer around it loads in the same way, and keeps what is random.
            around, plain = nn.ModuleList([layer]), nn.ModuleList([exact])
            before = {key: value.clone() for key, value in around.state_dict().items()}
            around.load_state_dict(plain.state_dict(), strict=True)
            for key, value in around.state_dict().items():
                assert torch.equal(value, before[key]), key
            assert len(before) >= len(plain.state_dict())


@pytest.mark.parametrize("name", LAYERS)
def test_c49_a_state_brings_all_that_is_random(name: str) -> None:
    layer, other = make(name), make(name)
    x, batch = torch.randn(40, 12, dtype=torch.float64), patterns.batch_vector([31, 9])
    assert not torch.allclose(other(x, batch), layer(x, batch))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, batch), layer(x, batch))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x, batch), layer(x, batch))
    random = {"projection", "rotations"} & set(layer.state_dict())
    assert random == {key for key, _ in layer.named_buffers()}
    layer.reset_parameters()
    for key in random:
        assert not torch.equal(layer.state_dict()[key], other.state_dict()[key])
    assert "12, num_heads=3" in repr(layer)


def test_one_projection_for_query_and_key_loads_where_they_are_equal() -> None:
    exact = exact_layer()
    with torch.no_grad():
        for packed in (exact.in_proj_weight, exact.in_proj_bias):
            packed[12:24] = packed[:12]
    layer = ReformerAttention.from_exact(exact, shared_qk=True)
    assert torch.equal(layer.in_proj_weight, exact.in_proj_weight[12:])
    assert torch.equal(layer.in_proj_bias, exact.in_proj_bias[12:])
    again = ReformerAttention(12, 3).double()
    again.load_state_dict(layer.state_dict())
    with torch.no_grad():
        exact.in_proj_bias[0] += 1.0
    with pytest.raises(ValueError, match=r"in_proj_bias has projections .* Use shared_qk=False\."):
        ReformerAttention.from_exact(exact, shared_qk=True)
    with pytest.raises(ValueError, match=r"0\.in_proj_weight has projections of query and key"):
        nn.ModuleList([layer]).load_state_dict(nn.ModuleList([exact_layer()]).state_dict())


# Performer ########################################################################################


def favor_reference(layer: PerformerAttention, x: Tensor) -> Tensor:
    """The layer on one graph by the paper's formula, with nothing to keep numbers small."""
    query, key, value = (
        part.unflatten(-1, (layer.num_heads, -1))
        for part in F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, dim=-1)
    )

    def phi(x: Tensor) -> Tensor:
        x = x / layer.head_dim**0.25
        along = torch.einsum("nhd,hmd->nhm", x, layer.projection)
        norm = x.square().sum(-1, keepdim=True)
        return (along - norm / 2).exp() / math.sqrt(layer.num_features)

    batch = torch.zeros(x.size(0), dtype=torch.int64)
    return layer.out_proj(quadratic(phi(query), phi(key), value, batch, layer.causal).flatten(1))


@pytest.mark.parametrize("causal", [False, True])
def test_performer_equals_the_formula(causal: bool) -> None:
    layer = PerformerAttention.from_exact(exact_layer(), num_features=9, causal=causal)
    for length in (1, 2, 127, 128, 300):
        x, weight = torch.randn(2, length, 12, dtype=torch.float64)
        x = x.detach().requires_grad_()
        out, expected = layer(x), favor_reference(layer, x)
        torch.testing.assert_close(out, expected, **EXACT)
        inputs = [x, *layer.parameters()]
        for actual, wanted in zip(
            torch.autograd.grad((out * weight).sum(), inputs),
            torch.autograd.grad((expected * weight).sum(), inputs),
            strict=True,
        ):
            assert_equal_to(actual, wanted)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_performer_step_equals_forward(dtype: torch.dtype, scale: float) -> None:
    layer = PerformerAttention(12, 3, causal=True).to(dtype)
    x = torch.randn(3, 150, 12, dtype=dtype) * scale
    expected = layer.eval()(x.flatten(0, 1), patterns.batch_vector([150] * 3)).view(3, 150, 12)
    state, outputs, shapes = None, [], set()
    for token in x.unbind(1):
        out, state = layer.step(token, state)
        outputs.append(out)
        shapes.add(tuple(part.shape for part in state))
    assert shapes == {((3, 3, 16), (3, 3, 16, 5))}  # as much memory at the end as at the start
    out = torch.stack(outputs, dim=1)
    # Logarithms grow with the square of the scale, and so does what rounding makes of them.
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}[dtype]
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance * scale**2)
    weight = torch.randn_like(out)
    if scale == 1.0:
        for actual, wanted in zip(
            torch.autograd.grad((out * weight).sum(), [*layer.parameters()]),
            torch.autograd.grad((expected * weight).sum(), [*layer.parameters()]),
            strict=True,
        ):
            assert_equal_to(actual, wanted)
    # A sequence that is chosen twice goes on as it would have.
    chosen = torch.tensor([2, 2])
    token = torch.randn(3, 12, dtype=dtype)
    branched, _ = layer.step(token[chosen], tuple(part[chosen] for part in state))
    torch.testing.assert_close(branched, layer.step(token, state)[0][chosen])


@pytest.mark.parametrize("causal", [False, True])
def test_performer_is_stable_for_numbers_of_any_size(causal: bool) -> None:
    layer = PerformerAttention(12, 3, causal=causal)
    with torch.no_grad():
        layer.out_proj.weight.copy_(torch.eye(12))
    same, growing = torch.ones(300, 1), torch.logspace(-2, 0, 300).unsqueeze(1)
    # Exponentials of some keys, or of all, are nothing beside those of others.
    for sizes in (1e-20 * same, 100.0 * same, 100.0 * growing, 100.0 * growing.flip(0)):
        x = (torch.randn(300, 12) * sizes).requires_grad_()
        value = layer._project(x)[-1]
        out = layer(x)
        out.sum().backward()
        assert out.isfinite().all()
        assert (out != 0.0).any(dim=1).all()
        assert out.abs().max() <= value.abs().max() * 1.001  # a mean of values
        if causal:
            torch.testing.assert_close(out[0], value[:, 0].flatten())
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_c76_projections_are_orthogonal_in_groups_and_of_normal_length() -> None:
    layer = PerformerAttention(32, 4, 20)
    projection = layer.projection
    assert projection.shape == (4, 20, 8)
    for group in projection.split(8, dim=1):
        products = F.normalize(group, dim=-1) @ F.normalize(group, dim=-1).mT
        eye = torch.eye(group.size(1)).expand_as(products)
        torch.testing.assert_close(products, eye, rtol=0, atol=1e-5)
    assert not torch.allclose(projection[0], projection[1])
    many = PerformerAttention(8, 1, 4000).projection
    assert abs(many.square().sum(-1).mean() - 8.0) < 0.4
    assert abs(many.square().sum(-1).var() - 16.0) < 3.0
    torch.testing.assert_close(many[0].T @ many[0] / 4000, torch.eye(8), rtol=0, atol=0.12)
    assert many.mean(dim=1).abs().max() < 0.1  # no direction is preferred


@pytest.mark.parametrize(("head_dim", "expected"), [(1, 16), (2, 16), (16, 45), (64, 267)])
def test_c76_default_number_of_features(head_dim: int, expected: int) -> None:
    layer = PerformerAttention(head_dim, 1)
    assert layer.num_features == layer.projection.size(1) == expected
    out = layer(torch.randn(9, head_dim))
    assert out.shape == (9, head_dim)
    assert out.isfinite().all()


def test_c76_redraw_schedule() -> None:
    layer = PerformerAttention(4, 2, redraw_interval=3)
    x, drawn = torch.randn(5, 4), []
    for _ in range(7):
        layer(x)
        drawn.append(layer.projection)
    same = [torch.equal(a, b) for a, b in itertools.pairwise(drawn)]
    assert same == [True, True, False, True, True, False]
    layer.eval()
    outputs = [layer(x) for _ in range(5)]
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert torch.equal(layer.projection, drawn[-1])
    fixed = PerformerAttention(4, 2, redraw_interval=None)
    first = fixed.projection.clone()
    for _ in range(10):
        fixed(x)
    assert torch.equal(fixed.projection, first)
    fixed.redraw()
    assert not torch.equal(fixed.projection, first)


def test_c76_a_redraw_leaves_an_earlier_backward_pass_alone() -> None:
    layer = PerformerAttention(4, 2, redraw_interval=1)
    x = torch.randn(5, 4, requires_grad=True)
    first = layer(x)
    expected = torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
    layer(x)
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], expected)


def test_c76_a_thousand_steps_of_one_channel_per_head() -> None:
    layer = PerformerAttention(2, 2, redraw_interval=100)
    x, batch = torch.randn(6, 2), torch.tensor([0, 0, 1, 1, 1, 1])
    seen = set()
    with torch.no_grad():
        for _ in range(1000):
            assert layer(x, batch).isfinite().all()
            seen.add(layer.projection[0, 0].item())
    assert len(seen) == 10


def errors(layers: list[nn.Module], exact: nn.Module, x: Tensor, batch: Tensor) -> Tensor:
    with torch.no_grad():
        expected = exact(x, batch)
        return (
            torch.stack([(layer(x, batch) - expected).norm() for layer in layers])
            / (expected - exact.out_proj.bias).norm()
        )


def test_c76_error_of_performer_falls_as_features_grow() -> None:
    exact = GlobalAttention(32, 4).double()
    x, batch = torch.randn(60, 32, dtype=torch.float64), patterns.batch_vector([45, 15])
    mean = [
        errors(
            [PerformerAttention.from_exact(exact, num_features=count) for _ in range(8)],
            exact,
            x,
            batch,
        ).mean()
        for count in (8, 64, 512)
    ]
    assert mean[1] < 0.8 * mean[0]
    assert mean[2] < 0.7 * mean[1]
    assert mean[2] < 0.35


# Lower precision ##################################################################################


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_c76_half_precision_and_autocast(name: str, dtype: torch.dtype) -> None:
    layer = make(name, torch.float32)
    if isinstance(layer, ReformerAttention):
        layer.bucket_size = 1000  # rounding would change who is in a bucket
    x, batch = torch.randn(200, 12), patterns.batch_vector([150, 50])
    expected = copy.deepcopy(layer).double()(x.double(), batch)
    tolerance = 40 * torch.finfo(dtype).eps * expected.abs().max().item()

    with torch.autocast("cpu", dtype=dtype):
        mixed = layer(x, batch)
    assert mixed.dtype == dtype
    assert (mixed.double() - expected).abs().max() < tolerance
    mixed.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())

    half = copy.deepcopy(layer).to(dtype)
    half.zero_grad()
    out = half(x.to(dtype), batch)
    assert out.dtype == dtype
    # Random features and mixtures are rounded too, and are then others.
    assert (out.double() - expected).abs().max() < 4 * tolerance
    out.float().square().mean().backward()
    for parameter in half.parameters():
        assert parameter.grad.dtype == dtype
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_c76_random_features_beyond_the_range_of_half(causal: bool, dtype: torch.dtype) -> None:
    layer = PerformerAttention(12, 3, causal=causal).to(dtype)
    x = torch.randn(50, 12, dtype=dtype) * 20.0  # squares of keys and exponentials overflow float16
    out = layer(x)
    out.float().sum().backward()
    assert out.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


# Linformer ########################################################################################


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_c77_linformer_equals_the_formula_at_any_length(shared: bool, per_head: bool) -> None:
    layer = LinformerAttention.from_exact(
        exact_layer(), 300, projected_length=6, shared=shared, per_head=per_head
    )
    length = [7, 16, 0, 1, 300, 129]
    x, batch = leaf(sum(length), 12), patterns.batch_vector(length)
    out, expected = layer(x, batch), []
    for part in x.split(length):
        query, key, value = (
            y.unflatten(-1, (3, 4)).transpose(0, 1)
            for y in F.linear(part, layer.in_proj_weight, layer.in_proj_bias).chunk(3, dim=-1)
        )
        of_key = layer.key_projection[:, :, : part.size(0)]
        of_value = of_key if shared else layer.value_projection[:, :, : part.size(0)]
        weights = (query @ (of_key @ key).mT / 2.0).softmax(dim=-1)
        expected.append((weights @ (of_value @ value)).transpose(0, 1).flatten(1))
    expected = layer.out_proj(torch.cat(expected))
    torch.testing.assert_close(out, expected, **EXACT)
    inputs = [x, *layer.parameters()]
    weight = torch.randn_like(out)
    for actual, wanted in zip(
        torch.autograd.grad((out * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        assert_equal_to(actual, wanted)


@pytest.mark.parametrize("per_head", [False, True])
def test_c77_linformer_with_the_identity_is_exact(per_head: bool) -> None:
    exact = exact_layer()
    layer = LinformerAttention.from_exact(exact, 9, projected_length=9, per_head=per_head)
    with torch.no_grad():
        layer.key_projection.copy_(torch.eye(9))
    x, batch = torch.randn(18, 12, dtype=torch.float64), patterns.batch_vector([9, 9])
    torch.testing.assert_close(layer(x, batch), exact(x, batch), **EXACT)


def test_c77_linformer_refuses_a_longer_graph() -> None:
    layer = LinformerAttention(12, 3, 16)
    message = (
        r"LinformerAttention: a graph has 17 nodes, but the layer was built with max_length=16\. "
        r"Use LinformerAttention\(\.\.\., max_length=17\)\."
    )
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(20, 12), patterns.batch_vector([3, 17]))
    assert layer(torch.randn(32, 12), patterns.batch_vector([16, 16])).isfinite().all()


# Reformer #########################################################################################


@pytest.mark.parametrize("backend", BACKENDS)
def test_reformer_with_one_bucket_is_exact(backend: str) -> None:
    exact = exact_layer()
    layer = ReformerAttention.from_exact(exact, bucket_size=20, chunk=20, backend=backend)
    batch = patterns.batch_vector([20, 1, 13])
    x, weight = torch.randn(2, 34, 12, dtype=torch.float64)
    actual, expected = (run(module, x, batch, weight) for module in (layer, exact))
    for part, value in expected.items():
        torch.testing.assert_close(actual[part], value, **EXACT)


def hashes(layer: ReformerAttention, x: Tensor) -> Tensor:
    """Buckets ``[rounds, H, n]`` of one graph's queries or keys ``[n, H, D]``, for up to 128."""
    count = math.ceil(x.size(0) / layer.bucket_size)
    half = math.ceil(count / 2)
    if count == 1:
        return torch.zeros(layer.num_hashes, x.size(1), x.size(0))
    turned = torch.einsum("nhd,rdc->rhnc", x, layer.rotations[:, 0, :, :half])
    return torch.cat([turned, -turned], dim=-1).argmax(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared_qk", [False, True])
def test_reformer_equals_dense_attention_within_buckets(shared_qk: bool, causal: bool) -> None:
    layer = ReformerAttention(
        12, 3, num_hashes=2, bucket_size=5, shared_qk=shared_qk, causal=causal
    ).double()
    length = [23, 1, 8, 5]
    x, batch = leaf(sum(length), 12), patterns.batch_vector(length)
    expected = []
    for part in x.split(length):
        projected = F.linear(part, layer.in_proj_weight, layer.in_proj_bias)
        *qk, value = projected.unflatten(-1, (-1, 3, 4)).unbind(1)
        query, hashed = qk[0], [hashes(layer, each) for each in qk]
        key = query / query.norm(dim=-1, keepdim=True) if shared_qk else qk[1]
        allowed = (hashed[0].unsqueeze(-1) == hashed[-1].unsqueeze(-2)).any(0)  # [H, n, n]
        eye = torch.eye(part.size(0), dtype=torch.bool)
        allowed = allowed.tril() if causal else allowed
        if shared_qk:
            others = allowed & ~eye
            allowed = others | (eye & ~others.any(-1, keepdim=True))
        else:
            allowed = allowed | eye
        out, _ = dense_attention(query, key, value, allowed, scale=1.0 if shared_qk else 0.5)
        expected.append(out.flatten(1))
    expected = layer.out_proj(torch.cat(expected))
    out = layer(x, batch)
    torch.testing.assert_close(out, expected, **EXACT)
    inputs = [x, *layer.parameters()]
    weight = torch.randn_like(out)
    for actual, wanted in zip(
        torch.autograd.grad((out * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        assert_equal_to(actual, wanted)


def edges_of(
    layer: ReformerAttention, x: Tensor, batch: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """The output, and the edges that it comes from."""
    graphs = []

    def attend(query: Tensor, key: Tensor, value: Tensor, graph: Any, **options: Any) -> Tensor:
        graphs.append(graph)
        return global_attention_operator(query, key, value, graph, **options)

    global_attention_operator = global_attention.graph_attention
    with monkeypatch.context() as patch:
        patch.setattr(global_attention, "graph_attention", attend)
        out = layer(x, batch)
    return out, graphs[0].edge_index


@pytest.mark.parametrize(("bucket_size", "mates"), [(64, 120), (4, 25)])
@pytest.mark.parametrize("shared_qk", [False, True])
def test_c78_reformer_takes_7777_nodes(
    shared_qk: bool, bucket_size: int, mates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = ReformerAttention(
        32, 1, num_hashes=2, bucket_size=bucket_size, shared_qk=shared_qk, chunk=bucket_size
    ).eval()
    x, batch = torch.randn(7777 + 13, 32), patterns.batch_vector([7777, 13])
    out, edge_index = edges_of(layer, x, batch, monkeypatch)
    assert out.shape == (7790, 32)
    assert out.isfinite().all()
    assert edge_index.size(1) <= 7790 * (2 * 2 * bucket_size + 1)
    assert edge_index[1].unique().numel() == 7790  # nobody is left with nothing
    assert edge_index[:, edge_index[1] >= 7777].min() >= 7777
    torch.testing.assert_close(layer(x[7777:]), out[7777:])
    # Buckets are about as small as they should be, also where their number takes two digits.
    layer.chunk = None
    _, whole = edges_of(layer, x, batch, monkeypatch)
    assert whole.size(1) / 7790 / 2 < mates


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129])
def test_c78_reformer_at_the_borders_of_buckets(length: int) -> None:
    for shared_qk in (False, True):
        layer = ReformerAttention(4, 2, bucket_size=64, shared_qk=shared_qk, chunk=64)
        assert layer(torch.randn(length, 4)).isfinite().all()


def test_reformer_with_zeros_has_finite_gradients() -> None:
    layer = ReformerAttention(4, 2, bucket_size=10)
    x = torch.randn(7, 4)
    x[2:4] = 0.0  # a key of no length, and no direction
    layer(x).square().sum().backward()
    for parameter in layer.parameters():
        assert 0.0 < parameter.grad.abs().max() < 1e3


def test_directions_of_hashing_are_of_one_length() -> None:
    norm = ReformerAttention(8, 2).rotations.norm(dim=-2)
    torch.testing.assert_close(norm, torch.ones_like(norm))


def test_error_of_reformer_falls_as_rounds_grow() -> None:
    exact = GlobalAttention(32, 4).double()
    x, batch = 2.0 * torch.randn(150, 32, dtype=torch.float64), patterns.batch_vector([100, 50])
    mean = [
        errors(
            [
                ReformerAttention.from_exact(exact, num_hashes=rounds, bucket_size=16)
                for _ in range(8)
            ],
            exact,
            x,
            batch,
        ).mean()
        for rounds in (1, 3, 9)
    ]
    assert mean[1] < 0.8 * mean[0]
    assert mean[2] < 0.5 * mean[1]


def test_buckets_of_queries_and_keys_apart() -> None:
    length = [9, 0, 6]
    batch = patterns.batch_vector(length)
    bucket, key_bucket = torch.randint(3, (2, 2, 15))
    meet = (bucket.unsqueeze(2) == key_bucket.unsqueeze(1)).any(0)
    meet &= batch.unsqueeze(1) == batch
    edge_index = patterns.lsh_buckets(bucket, key_bucket=key_bucket, batch=batch)
    assert torch.equal(edge_index, patterns.from_mask(meet))
    edge_index = patterns.lsh_buckets(bucket, key_bucket=key_bucket, batch=batch, causal=True)
    assert torch.equal(edge_index, patterns.from_mask(meet.tril()))
    wide = patterns.lsh_buckets(bucket, key_bucket=key_bucket, batch=batch, chunk=9)
    assert torch.equal(wide, patterns.from_mask(meet))
    narrow = patterns.lsh_buckets(bucket[0], key_bucket=key_bucket[0], batch=batch, chunk=1)
    assert narrow[1].bincount().max() <= 2
    same = patterns.lsh_buckets(bucket, key_bucket=bucket, batch=batch, chunk=2)
    assert torch.equal(same, patterns.lsh_buckets(bucket, batch=batch, chunk=2))
    with pytest.raises(ValueError, match=r"key_bucket must have the shape of bucket \(2, 15\)"):
        patterns.lsh_buckets(bucket, key_bucket=key_bucket[0])


# Dropout, errors ##################################################################################


@pytest.mark.parametrize("name", ["exact", "linformer", "reformer"])
def test_c45_dropout_acts_in_training_only(name: str) -> None:
    layer = make(name)
    x, batch = torch.randn(12, 12, dtype=torch.float64), patterns.batch_vector([8, 4])
    without = layer(x, batch)
    layer.dropout = 0.5
    assert torch.equal(layer(x, batch), without)
    layer.train()
    assert not torch.allclose(layer(x, batch), without)
    with torch.no_grad():
        mean = torch.stack([layer(x, batch) for _ in range(150)]).mean(0)
    assert (mean - without).abs().max() < 0.6
    layer.dropout = 1.0
    torch.testing.assert_close(layer(x, batch), layer.out_proj.bias.expand(12, -1))


CLASSES = [GlobalAttention, PerformerAttention, LinformerAttention, ReformerAttention]


def build(kind: type[nn.Module], embed_dim: int, heads: int, **options: Any) -> nn.Module:
    return kind(embed_dim, heads, *([8] if kind is LinformerAttention else []), **options)


@pytest.mark.parametrize("kind", CLASSES)
def test_c42_sizes_are_checked_at_construction(kind: type[nn.Module]) -> None:
    message = f"{kind.__name__}: embed_dim 10 must be divisible by num_heads 4."
    with pytest.raises(ValueError, match=re.escape(message)):
        build(kind, 10, 4)
    with pytest.raises(ValueError, match=rf"{kind.__name__}: num_heads must be at least 1, got 0"):
        build(kind, 10, 0)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (GlobalAttention, {"dropout": 1.5}, "dropout must be a probability from 0 to 1, got 1.5"),
        (LinformerAttention, {"dropout": -1}, "dropout must be a probability from 0 to 1, got -1"),
        (ReformerAttention, {"dropout": 2.0}, "dropout must be a probability from 0 to 1, got 2.0"),
        (GlobalAttention, {"backend": "gpu"}, "unknown backend 'gpu'. Use one of"),
        (ReformerAttention, {"backend": "gpu"}, "unknown backend 'gpu'. Use one of"),
        (PerformerAttention, {"num_features": 0}, "num_features must be at least 1, got 0"),
        (PerformerAttention, {"redraw_interval": 0}, "redraw_interval must be at least 1, got 0"),
        (LinformerAttention, {"projected_length": 0}, "projected_length must be at least 1, got 0"),
        (ReformerAttention, {"num_hashes": 0}, "num_hashes must be at least 1, got 0"),
        (ReformerAttention, {"bucket_size": 0}, "bucket_size must be at least 1, got 0"),
        (ReformerAttention, {"chunk": 0}, "chunk must be at least 1, got 0"),
    ],
)
def test_options_out_of_range(kind: type[nn.Module], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: {re.escape(message)}"):
        build(kind, 8, 2, **options)


@pytest.mark.parametrize("kind", CLASSES)
def test_inputs_of_another_shape(kind: type[nn.Module]) -> None:
    layer = build(kind, 8, 2)
    for shape in ((2, 3, 8), (3, 7), (8,)):
        message = f"{kind.__name__}: x must have shape (num_nodes, embed_dim) = (N, 8), got {shape}"
        with pytest.raises(ValueError, match=re.escape(message)):
            layer(torch.randn(shape))
    for batch in (torch.zeros(4), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"batch must be an int64 tensor of shape \(4,\)"):
            layer(torch.randn(4, 8), batch)
    for unsorted in ([0, 1, 0, 1], [-1, 0, 0, 0]):
        with pytest.raises(ValueError, match=r"batch must be sorted and not negative.*stable=True"):
            layer(torch.randn(4, 8), torch.tensor(unsorted))


def test_linear_attention_names_what_does_not_fit() -> None:
    x, value = torch.ones(4, 2, 3), torch.ones(4, 2, 5)
    with pytest.raises(TypeError, match="linear_attention: value must be floating point, got"):
        linear_attention(x, x, value.long())
    for tensors, argument in (((x, x, value[:3]), "value"), ((x, x[:, :1], value), "key_features")):
        with pytest.raises(ValueError, match=rf"{argument} must have shape \(num_nodes, heads, ch"):
            linear_attention(*tensors)
    with pytest.raises(ValueError, match=r"must have the same shape, got \(4, 2, 3\) and \(4, 2,"):
        linear_attention(x, x[..., :2], value)
    with pytest.raises(ValueError, match="linear_attention: batch must be sorted"):
        linear_attention(x, x, value, batch=torch.tensor([1, 0, 0, 0]))


def test_step_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"PerformerAttention\.step: a recurrence needs causal"):
        PerformerAttention(8, 2).step(torch.randn(1, 8))
    layer = PerformerAttention(8, 2, causal=True)
    _, state = layer.step(torch.randn(3, 8))
    with pytest.raises(ValueError, match=r"state must be that of 2 sequences, \(2, 2, 16\), got"):
        layer.step(torch.randn(2, 8), state)
    with pytest.raises(ValueError, match=r"x must have shape \(num_nodes, embed_dim\)"):
        layer.step(torch.randn(1, 2, 8))


@pytest.mark.parametrize("name", FROM_EXACT)
def test_from_exact_refuses_what_would_be_lost(name: str) -> None:
    rotary = GraphMultiheadAttention(12, 3, rotary=nn.Identity())
    for module, option in (
        (nn.MultiheadAttention(12, 3, kdim=5), "kdim or vdim"),
        (GraphMultiheadAttention(12, 3, vdim=5), "kdim or vdim"),
        (nn.MultiheadAttention(12, 3, add_bias_kv=True), "add_bias_kv"),
        (nn.MultiheadAttention(12, 3, add_zero_attn=True), "add_zero_attn"),
        (GraphMultiheadAttention(12, 3, edge_dim=2), "edge_dim"),
        (rotary, "rotary"),
    ):
        with pytest.raises(ValueError, match=f"from_exact: the module was built with {option}, wh"):
            FROM_EXACT[name](module)
    with pytest.raises(TypeError, match=r"from_exact: module must be a GlobalAttention, .* Linear"):
        FROM_EXACT[name](nn.Linear(12, 12))
