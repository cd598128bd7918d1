"""AttentionDiffusion against its formula, AGNN's layer, APPNP's and the inverse it comes to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from torch_geometric.nn import APPNP, AGNNConv
from torch_geometric.utils import to_undirected

from graphattn import Graph
from graphattn.nn import AttentionDiffusion

EDGES = torch.tensor([[0, 1, 2, 3, 3, 1, 2], [1, 2, 0, 0, 1, 1, 2]])  # node 4 is isolated


def features(*size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*size, dtype=torch.float64, generator=generator)


def weights(x: torch.Tensor, beta: float) -> torch.Tensor:
    """The dense matrix of the formula, target by source; zero rows where nobody is seen."""
    score = beta * F.cosine_similarity(x[:, None], x[None], dim=-1)
    seen = torch.zeros(len(x), len(x), dtype=torch.bool)
    seen[EDGES[1], EDGES[0]] = True
    return score.masked_fill(~seen, -torch.inf).softmax(dim=1).nan_to_num()


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize(("steps", "teleport"), [(1, 0.0), (1, 0.3), (4, 0.1), (3, 1.0)])
def test_equals_its_formula(heads, steps, teleport):
    x = features(5, 8)
    layer = AttentionDiffusion(8, heads, steps=steps, teleport=teleport).double()
    with torch.no_grad():
        layer.beta.copy_(torch.linspace(-1.0, 3.0, heads))
    expected = []
    for part, beta in zip(x.unflatten(1, (heads, -1)).unbind(1), layer.beta.tolist(), strict=True):
        matrix, state = weights(part, beta), part
        for _ in range(steps):
            state = (1 - teleport) * matrix @ state + teleport * part
        expected.append(state)
    torch.testing.assert_close(layer(x, EDGES), torch.cat(expected, dim=1))
    torch.testing.assert_close(layer(x, Graph(EDGES, 5)), layer(x, EDGES))


def test_many_steps_come_to_the_inverse():
    x = features(5, 4)
    layer = AttentionDiffusion(4, steps=400, teleport=0.1).double()
    matrix = torch.eye(5, dtype=torch.float64) - 0.9 * weights(x, 1.0)
    torch.testing.assert_close(layer(x, EDGES), 0.1 * torch.linalg.solve(matrix, x))


def test_one_step_without_teleport_is_agnn():
    x = features(5, 8)
    reference = AGNNConv(add_self_loops=False).double()
    torch.nn.init.constant_(reference.beta, 2.5)
    layer = AttentionDiffusion(8, steps=1, teleport=0.0).double()
    torch.nn.init.constant_(layer.beta, 2.5)
    torch.testing.assert_close(layer(x, EDGES), reference(x, EDGES))


def test_equal_weights_are_appnp_where_all_degrees_agree():
    circle = to_undirected(torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6]))
    x = features(6, 4)
    layer = AttentionDiffusion(4, steps=5, teleport=0.2).double()
    torch.nn.init.zeros_(layer.beta)
    reference = APPNP(5, 0.2)  # adds self-loops
    graph = Graph(circle, 6).add_self_loops()
    torch.testing.assert_close(layer(x, graph), reference(x, circle))


def test_gradients_of_features_and_of_beta():
    x = features(5, 4).requires_grad_()
    layer = AttentionDiffusion(4, 2, steps=3).double()
    assert torch.autograd.gradcheck(lambda x, _: layer(x, EDGES), (x, layer.beta))


def test_a_row_of_zeros_is_similar_to_nothing_and_has_a_gradient():
    x = features(5, 4)
    x[1] = 0.0
    x.requires_grad_()
    layer = AttentionDiffusion(4, steps=3).double()
    out = layer(x, EDGES)
    out.square().sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() < 100.0
    assert x.grad[1].abs().sum() > 0.0
    # All cosines of node 1 are zero: it sees 0, 3 and itself alike.
    one_step = AttentionDiffusion(4, steps=1, teleport=0.0).double()
    torch.testing.assert_close(one_step(x, EDGES)[1], (x[0] + x[3] + x[1]) / 3)


def test_a_node_that_sees_nobody_keeps_a_share_of_itself():
    x = features(5, 4)
    layer = AttentionDiffusion(4, steps=3, teleport=0.1).double()
    torch.testing.assert_close(layer(x, EDGES)[4], 0.1 * x[4])
    torch.testing.assert_close(layer(x, Graph(EDGES, 5).add_self_loops())[4], x[4])


def test_leading_dimensions_and_renamed_nodes():
    x = features(3, 5, 8)
    layer = AttentionDiffusion(8, 2, steps=3).double()
    together = layer(x, EDGES)
    for one, out in zip(x, together, strict=True):
        torch.testing.assert_close(layer(one, EDGES), out)
    order = torch.tensor([3, 0, 4, 1, 2])  # node i becomes order[i]
    moved = torch.empty_like(x[0]).index_copy_(0, order, x[0])
    torch.testing.assert_close(layer(moved, order[EDGES])[order], together[0])


def test_dropout_is_of_weights_and_off_in_evaluation():
    x = features(5, 8)
    layer = AttentionDiffusion(8, steps=2, teleport=0.25, dropout=1.0).double()
    torch.testing.assert_close(layer(x, EDGES), 0.25 * x)
    layer = AttentionDiffusion(8, steps=2, dropout=0.5).double()
    assert not torch.equal(layer(x, EDGES), layer(x, EDGES))
    assert torch.equal(layer.eval()(x, EDGES), layer(x, EDGES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype(dtype):
    x = features(5, 8)
    layer = AttentionDiffusion(8, 2, steps=4).double()
    expected = layer(x, EDGES)
    out = layer.to(dtype)(x.to(dtype), EDGES)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=0.05, rtol=0.05)


def test_state_dict_copy_and_reset():
    layer = AttentionDiffusion(8, 2)
    torch.nn.init.constant_(layer.beta, 3.0)
    twin = AttentionDiffusion(8, 2)
    twin.load_state_dict(layer.state_dict())
    assert twin.beta.tolist() == copy.deepcopy(layer).beta.tolist() == [3.0, 3.0]
    twin.reset_parameters()
    assert twin.beta.tolist() == [1.0, 1.0]
    assert "8, heads=2, steps=10, teleport=0.1" in repr(layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "channels 8 must be divisible by heads 3"),
        ({"channels": 0}, "channels must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"teleport": 1.5}, "teleport must be a probability from 0 to 1, got 1.5"),
        ({"dropout": -0.5}, "dropout must be a probability from 0 to 1, got -0.5"),
        ({"backend": "fast"}, "backend"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionDiffusion(**{"channels": 8, **options})


def test_wrong_inputs_are_named():
    layer = AttentionDiffusion(8)
    with pytest.raises(ValueError, match=r"x must have shape \(\*, num_nodes, 8\), got \(5, 4\)"):
        layer(torch.zeros(5, 4), EDGES)
    with pytest.raises(IndexError):
        layer(torch.zeros(3, 8), EDGES)
