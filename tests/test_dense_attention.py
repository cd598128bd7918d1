"""graphattn.dense_attention: the N x N reference, judged by loops and by torch itself."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import graphattn.reference
from graphattn import Graph, dense_attention, graph_attention
from graphattn.testing import zoo

EXACT = {"rtol": 1e-12, "atol": 1e-12}
SMALL = {case.name: case for case in zoo(hub=20)}


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def three(num_dst=5, num_src=6, heads=2, key_heads=None, dim=4, value_dim=3, leading=()):
    key_heads = heads if key_heads is None else key_heads
    return (
        randn(*leading, num_dst, heads, dim),
        randn(*leading, num_src, key_heads, dim),
        randn(*leading, num_src, key_heads, value_dim),
    )


def by_loop(query, key, value, graph, bias=None, scale=None):
    """One target, head and edge after the other."""
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    heads, repeats = query.size(-2), query.size(-2) // key.size(-2)
    rows = []
    for i in range(graph.num_dst):
        edges = [e for e, dst in enumerate(graph.edge_index[1].tolist()) if dst == i]
        src = graph.edge_index[0, edges]
        for h in range(heads):
            if not edges:
                rows.append(query.new_zeros(value.size(-1)))
                continue
            score = scale * (key[src, h // repeats] @ query[i, h])
            score = score if bias is None else score + bias[edges, h]
            rows.append(torch.softmax(score, 0) @ value[src, h // repeats])
    if not rows:
        return query.new_zeros(graph.num_dst, heads, value.size(-1))
    return torch.stack(rows).view(graph.num_dst, heads, value.size(-1))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("name", SMALL)
def test_zoo_by_its_edges_equals_a_loop(name, key_heads, with_bias):
    case = SMALL[name]
    tensors = [*three(case.num_dst, case.num_src, key_heads=key_heads)]
    if with_bias:
        tensors.append(randn(case.edge_index.size(1), 2))
    bias = tensors[3] if with_bias else None
    output, weights = dense_attention(*tensors[:3], case.graph(), bias=bias)
    expected = by_loop(*tensors[:3], case.graph(), bias)
    torch.testing.assert_close(output, expected, **EXACT)
    assert weights.shape == (2, case.num_dst, case.num_src)
    some = (case.graph().in_degree() > 0).double().expand(2, -1)
    torch.testing.assert_close(weights.sum(-1), some, **EXACT)
    if expected.requires_grad:
        cotangent = torch.randn_like(output)
        torch.testing.assert_close(
            torch.autograd.grad(output, tensors, cotangent),
            torch.autograd.grad(
                expected, tensors, cotangent, allow_unused=True, materialize_grads=True
            ),
            **EXACT,
        )


def test_all_pairs_and_any_mask_equal_scaled_dot_product_attention():
    query, key, value = three(leading=(2,))
    by_head = [x.transpose(-2, -3) for x in (query, key, value)]
    mask = torch.rand(5, 6) < 0.5
    mask[:, 0] = True
    for allowed in (None, mask):
        for bias in (None, randn(2, 2, 5, 6), randn(2, 1, 1), randn(6)):
            additive = torch.zeros((), dtype=torch.float64) if bias is None else bias
            if allowed is not None:
                additive = additive.expand(2, 2, 5, 6).masked_fill(~allowed, -math.inf)
            expected = F.scaled_dot_product_attention(
                *by_head, attn_mask=additive.expand(2, 2, 5, 6)
            )
            output, _ = dense_attention(query, key, value, allowed, bias=bias)
            torch.testing.assert_close(output, expected.transpose(-2, -3), **EXACT)


def test_c88_true_means_allowed_as_in_scaled_dot_product_attention():
    query, key, value = three(5, 5)
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    output, weights = dense_attention(query, key, value, lower)
    assert weights.triu(1).eq(0).all()
    by_head = (x.transpose(0, 1) for x in (query, key, value))
    expected = F.scaled_dot_product_attention(*by_head, attn_mask=lower).transpose(0, 1)
    torch.testing.assert_close(output, expected, **EXACT)
    torch.testing.assert_close(
        graph_attention(query, key, value, Graph.from_mask(lower)), expected, **EXACT
    )


def test_c88_true_means_forbidden_in_multihead_attention_so_its_mask_is_turned():
    x = torch.randn(5, 1, 4, dtype=torch.float64)
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    layer = torch.nn.MultiheadAttention(4, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(4).repeat(3, 1))
        layer.out_proj.weight.copy_(torch.eye(4))
    theirs, their_weights = layer(x, x, x, attn_mask=~lower)
    rows = x.view(5, 1, 4)
    output, weights = dense_attention(rows, rows, rows, lower)
    torch.testing.assert_close(output.view_as(theirs), theirs)
    torch.testing.assert_close(weights, their_weights)
    sparse = graph_attention(rows, rows, rows, Graph.from_mask(lower))
    torch.testing.assert_close(sparse.view_as(theirs), theirs)


@pytest.mark.parametrize("shape", [(5, 6), (1, 5, 6), (2, 5, 6), (3, 1, 5, 6), (3, 2, 5, 6)])
def test_masks_of_every_broadcastable_shape(shape):
    query, key, value = three(leading=(3,))
    mask = torch.rand(shape) < 0.5
    output, weights = dense_attention(query, key, value, mask)
    whole = mask.expand(3, 2, 5, 6)
    assert weights[~whole].eq(0).all()
    for b in range(3):
        for h in range(2):
            alone, _ = dense_attention(
                query[b, :, h : h + 1], key[b, :, h : h + 1], value[b, :, h : h + 1], whole[b, h]
            )
            torch.testing.assert_close(output[b, :, h : h + 1], alone, **EXACT)


def test_c09_c10_row_with_nothing_allowed_is_zero_with_zero_gradients():
    query, key, value = three(3, 3)
    allowed = torch.ones(3, 3, dtype=torch.bool)
    allowed[1] = False
    output, weights = dense_attention(query, key, value, allowed)
    assert output[1].eq(0).all()
    assert weights[:, 1].eq(0).all()
    (output.sin().sum() + weights.cos().sum()).backward()
    assert query.grad[1].eq(0).all()
    assert all(x.grad.isfinite().all() for x in (query, key, value))
    assert key.grad.abs().sum() > 0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_c10_a_bad_gradient_into_an_empty_row_goes_nowhere(poison):
    query, key, value = three(3, 3)
    allowed = torch.tensor([[True, False, True], [False] * 3, [True] * 3])
    output, weights = dense_attention(query, key, value, allowed)
    into_output, into_weights = torch.zeros_like(output), torch.zeros_like(weights)
    into_output[1], into_weights[:, 1] = poison, poison
    grads = torch.autograd.grad([output, weights], [query, key, value], [into_output, into_weights])
    assert all(grad.eq(0).all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_c08_row_of_the_lowest_numbers_is_the_mean_and_of_minus_infinity_zero(dtype):
    query, key = torch.zeros(2, 1, 4, dtype=dtype), torch.zeros(3, 1, 4, dtype=dtype)
    value = torch.tensor([1.0, 2.0, 3.0], dtype=dtype).view(3, 1, 1)
    bias = torch.full((2, 3), torch.finfo(dtype).min)
    output, _ = dense_attention(query, key, value, bias=bias)
    assert output.flatten().tolist() == [2.0, 2.0]
    bias[1] = -math.inf
    output, weights = dense_attention(query, key, value, bias=bias)
    assert output.flatten().tolist() == [2.0, 0.0]
    assert output.dtype == weights.dtype == dtype


def test_c08_padding_and_causal_masks_are_combined_logically():
    query, key, value = three(4, 4)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    padding = torch.tensor([False, True, True, True])  # the first key is padding
    output, weights = dense_attention(query, key, value, causal & padding)
    assert output[0].eq(0).all()
    assert weights.isfinite().all()


@pytest.mark.parametrize("training", [False, True])
def test_c15_additive_bias_of_any_numbers_in_training_and_evaluation(training):
    tensors = three(3, 3)
    bias = randn(2, 3, 3)
    with torch.set_grad_enabled(training):
        output, weights = dense_attention(*tensors, bias=bias)
    assert output.requires_grad == training
    score = torch.einsum("ihd,jhd->hij", *tensors[:2]) / 2.0 + bias
    torch.testing.assert_close(weights.detach(), score.softmax(-1).detach(), **EXACT)
    assert output.isfinite().all()


def test_c36_parallel_edges_count_by_their_multiplicity():
    graph = Graph(torch.tensor([[0, 0, 2, 0], [1, 1, 1, 0]]), 3)
    query, key, value = three(3, 3, heads=1)
    _, weights = dense_attention(query, key, value, graph)
    score = (key[:, 0] @ query[1, 0] / 2.0).exp()
    torch.testing.assert_close(weights[0, 1, 0], 2 * score[0] / (2 * score[0] + score[2]))
    bias = torch.log(torch.tensor([[3.0], [1.0], [1.0], [1.0]], dtype=torch.float64))
    _, weights = dense_attention(query, key, value, graph, bias=bias)
    torch.testing.assert_close(weights[0, 1, 0], 4 * score[0] / (4 * score[0] + score[2]))


def test_parallel_edges_with_biases_far_apart():
    graph = Graph(torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]), (2, 1))
    bias = torch.tensor([[1e5], [-1e5], [1e5], [-math.inf]], requires_grad=True)
    query, key = torch.zeros(1, 1, 1), torch.zeros(2, 1, 1)
    output, weights = dense_attention(query, key, torch.ones(2, 1, 1), graph, bias=bias)
    assert weights.flatten().tolist() == [0.5, 0.5]
    weights[0, 0, 0].backward()
    torch.testing.assert_close(bias.grad.flatten(), torch.tensor([0.25, 0.0, -0.25, 0.0]))
    assert output.item() == 1.0


def test_an_edge_of_minus_infinity_is_no_edge_and_its_gradient_is_zero():
    graph = Graph(torch.tensor([[0, 1, 1], [0, 0, 1]]), 2)
    tensors = three(2, 2, heads=1)
    bias = torch.tensor([[0.5], [-math.inf], [-math.inf]], dtype=torch.float64, requires_grad=True)
    output, _ = dense_attention(*tensors, graph, bias=bias)
    torch.testing.assert_close(output[0], tensors[2][0])
    assert output[1].eq(0).all()
    for grad in torch.autograd.grad(output.sin().sum(), [*tensors, bias]):
        assert grad.isfinite().all()


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_bias_of_edges_with_leading_dimensions(leading):
    case = SMALL["shuffled"]
    tensors = three(30, 30, heads=4, key_heads=2, leading=leading)
    bias = randn(*leading, 200, 4)
    output, _ = dense_attention(*tensors, case.graph(), bias=bias)
    torch.testing.assert_close(
        output, graph_attention(*tensors, case.graph(), bias=bias), rtol=1e-10, atol=1e-10
    )


def test_gradcheck_and_gradgradcheck_with_a_graph_and_with_a_mask():
    query, key, value = three(3, 3, key_heads=1, dim=2, value_dim=2)
    graph = SMALL["parallel edges"].graph()
    per_edge, per_pair = randn(5, 2), randn(2, 3, 3)
    mask = torch.tensor([[True, False, True], [False] * 3, [True] * 3])
    for allowed, bias in ((graph, per_edge), (mask, per_pair)):

        def attend(query, key, value, bias, allowed=allowed):
            return dense_attention(query, key, value, allowed, bias=bias)

        assert gradcheck(attend, (query, key, value, bias))
        assert gradgradcheck(attend, (query, key, value, bias))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_contract_7_nan_where_attention_is_not_allowed_never_spreads(poison):
    query, key, value = three(4, 4, value_dim=4)
    allowed = torch.zeros(4, 4, dtype=torch.bool)
    allowed[:2, :2] = allowed[2:, 2:] = True
    clean, _ = dense_attention(query, key, value, allowed)
    clean_grads = torch.autograd.grad(clean[:2].sin().sum(), (query, key, value))
    with torch.no_grad():
        for x in (query, key, value):
            x[2:] = poison
    for mask in (allowed, Graph.from_mask(allowed)):
        output, weights = dense_attention(query, key, value, mask)
        torch.testing.assert_close(output[:2], clean[:2], **EXACT)
        assert weights[:, :2].isfinite().all()
        assert output[2:].isnan().all()
        cotangent = clean.detach().cos()
        cotangent[2:] = poison
        grads = torch.autograd.grad(output, (query, key, value), cotangent)
        for grad, expected in zip(grads, clean_grads, strict=True):
            torch.testing.assert_close(grad[:2], expected[:2], **EXACT)


def test_nan_is_seen_by_all_when_all_pairs_are_allowed():
    query, key, value = three(3, 3)
    with torch.no_grad():
        value[0] = math.nan
    output, weights = dense_attention(query, key, value)
    assert output.isnan().all()
    assert weights.isfinite().all()


def test_scale_zero_is_zero():
    query, key, value = three(3, 4)
    output, weights = dense_attention(query, key, value, scale=0.0)
    torch.testing.assert_close(weights, torch.full_like(weights, 0.25))
    torch.testing.assert_close(output, value.mean(0).expand_as(output))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    query, key, value = (x.detach().to(dtype) for x in three(9, 9))
    output, weights = dense_attention(query, key, value)
    assert output.dtype == weights.dtype == dtype
    single, _ = dense_attention(query.float(), key.float(), value.float())
    assert torch.equal(output, single.to(dtype))


def test_c67_refuses_what_would_not_fit_with_the_estimate(monkeypatch):
    query = torch.empty(1, 8, 4).expand(50_000, 8, 4)
    text = (
        r"dense_attention: 50000 x 50000 scores for 8 heads need about 223\.5 GiB, more than "
        r"{} GiB\. Use graph_attention, whose memory grows with the edges\."
    )
    with pytest.raises(MemoryError, match=text.format(r"1\.0")):
        dense_attention(query, query, query, max_bytes=2**30)
    monkeypatch.setattr(graphattn.reference.os, "sysconf", lambda name: 2**17)
    with pytest.raises(MemoryError, match=text.format(r"16\.0")):
        dense_attention(query, query, query)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2**35))
    assert graphattn.reference._memory_of(torch.device("cuda")) == 2**35


def test_the_default_limit_is_the_memory_of_the_machine():
    assert 2**28 < graphattn.reference._memory_of(torch.device("cpu")) < 2**50


def test_refusals():
    query, key, value = three(3, 3)
    with pytest.raises(
        TypeError,
        match=r"dense_attention: allowed must be bool \(True where attention is allowed\), got "
        r"torch\.float32\. Give additive masks as bias\.",
    ):
        dense_attention(query, key, value, torch.zeros(3, 3))
    with pytest.raises(
        TypeError, match=r"dense_attention: allowed must be a bool tensor or a Graph, got list\."
    ):
        dense_attention(query, key, value, [[True]])
    with pytest.raises(
        ValueError,
        match=r"dense_attention: the graph has 4 sources and 3 targets, but key has 3 rows and "
        r"query 3\.",
    ):
        dense_attention(query, key, value, Graph(torch.tensor([[0], [0]]), (4, 3)))
    for key_heads in (0, 4, 3):
        with pytest.raises(
            ValueError,
            match=rf"dense_attention: the number of key heads must divide the 2 query heads, got "
            rf"{key_heads}\.",
        ):
            dense_attention(query, randn(3, key_heads, 4), randn(3, key_heads, 3))
    with pytest.raises(TypeError, match="positional"):
        dense_attention(query, key, value, None, None)
