"""Structural encodings and attention edges as transforms, on graphs that break such code."""

import functools

import networkx as nx
import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import ArpackError
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader

from graphattn import Graph, patterns, transforms
from graphattn.nn import GraphTransformerLayer
from graphattn.nn.encoding import LaplacianEncoding, ShortestPathBias
from graphattn.testing import zoo
from graphattn.transforms import AddAttentionEdges, AddLaplacianEigenvectors, AddRandomWalk

ZOO = [case for case in zoo(hub=50) if case.num_src == case.num_dst]
TRANSFORMS = {
    "laplacian": AddLaplacianEigenvectors(2),
    "random walk": AddRandomWalk(3),
    "attention": AddAttentionEdges(patterns.complete, max_distance=2),
}
each_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def data_of(edges, num_nodes):
    return Data(
        edge_index=torch.as_tensor(edges, dtype=torch.long).view(2, -1), num_nodes=num_nodes
    )


def path(num_nodes):
    """Directed: 0 -> 1 -> 2 -> ..."""
    nodes = torch.arange(num_nodes)
    return data_of(torch.stack([nodes[:-1], nodes[1:]]) if num_nodes > 0 else [], num_nodes)


def of_networkx(graph):
    graph = nx.convert_node_labels_to_integers(graph)
    return data_of(torch.tensor(list(graph.edges())).t(), len(graph))


@st.composite
def any_data(draw, max_nodes=9):
    num_nodes = draw(st.integers(0, max_nodes))
    node = st.integers(0, max(num_nodes - 1, 0))
    edges = draw(st.lists(st.tuples(node, node), max_size=3 * num_nodes))
    return data_of(np.array(edges, dtype=np.int64).reshape(-1, 2).T, num_nodes)


def undirected(data):
    """The simple graph behind the edges, by networkx."""
    graph = nx.empty_graph(data.num_nodes)
    graph.add_edges_from(edge for edge in data.edge_index.t().tolist() if edge[0] != edge[1])
    return graph


# Laplacian eigenvectors ###########################################################################


def laplacian(graph, nodes, normalization):
    """Of one component, as a dense matrix from its definition."""
    adjacency = nx.to_numpy_array(graph, nodelist=nodes)
    degree = adjacency.sum(1)
    if normalization is None:
        return np.diag(degree) - adjacency
    if normalization == "rw":
        return np.eye(len(nodes)) - adjacency / degree[:, None]
    return np.eye(len(nodes)) - adjacency / np.sqrt(np.outer(degree, degree))


def assert_eigenvectors(data, k, normalization, *, atol=1e-10):
    """Each component's rows hold the first eigenvectors of its own Laplacian, but the trivial."""
    transform = AddLaplacianEigenvectors(k, normalization=normalization)
    out = transform(data)
    values, mask = out.laplacian_eigenvectors, out.laplacian_eigenvectors_mask
    assert values.shape == mask.shape == (data.num_nodes, k)
    assert values.dtype == torch.float64
    assert mask.dtype == torch.bool
    assert values.isfinite().all()
    assert not values[~mask].any()
    graph = undirected(data)
    for component in nx.connected_components(graph):
        nodes = sorted(component)
        count = min(k, len(nodes) - 1)
        expected = torch.arange(k) < count
        assert torch.equal(mask[nodes], expected.expand(len(nodes), k))
        if count == 0:
            continue
        matrix, vectors = laplacian(graph, nodes, normalization), values[nodes, :count].numpy()
        eigenvalues = np.sort(np.linalg.eigvals(matrix).real)[1 : count + 1]
        np.testing.assert_allclose(matrix @ vectors, vectors * eigenvalues, rtol=0, atol=atol)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=0), 1.0, rtol=0, atol=atol)
        if normalization is None:  # symmetric: a basis of its own, at a right angle to the trivial
            gram = np.eye(count)
            np.testing.assert_allclose(vectors.T @ vectors, gram, rtol=0, atol=atol)
            np.testing.assert_allclose(vectors.sum(0), 0.0, rtol=0, atol=atol)
    return out


@pytest.mark.parametrize("normalization", ["sym", "rw", None])
@pytest.mark.parametrize("num_nodes", [0, 1, 2, 8, 9, 10])
def test_c70_more_eigenvectors_asked_for_than_there_are(num_nodes, normalization):
    out = assert_eigenvectors(path(num_nodes), 8, normalization)
    count = min(8, max(num_nodes - 1, 0))
    assert out.laplacian_eigenvectors_mask.sum() == num_nodes * count
    # No two nodes of a path are alike.
    assert out.laplacian_eigenvectors.unique(dim=0).size(0) == num_nodes


@pytest.mark.parametrize("num_nodes", [0, 1, 4])
def test_c70_no_edges(num_nodes):
    out = assert_eigenvectors(data_of([], num_nodes), 3, "sym")
    assert not out.laplacian_eigenvectors_mask.any()


def test_c72_a_directed_path_has_the_eigenvectors_of_the_path():
    # Eigenvalues 1 and 2 of the normalised Laplacian, worked out by hand.
    half, root = 0.5, 0.5**0.5
    expected = torch.tensor([[root, -half], [0.0, root], [-root, -half]])
    for edges in ([[0, 1], [1, 2]], [[0, 1, 1, 2], [1, 0, 2, 1]], [[2, 1], [1, 0]]):
        out = AddLaplacianEigenvectors(2)(data_of(edges, 3))
        torch.testing.assert_close(out.laplacian_eigenvectors, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalization", ["sym", "rw", None])
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_eigenvectors_on_the_zoo(case, normalization):
    assert_eigenvectors(data_of(case.edge_index, case.num_src), 5, normalization)


@given(any_data(), st.integers(1, 10), st.sampled_from(["sym", "rw", None]))
@settings(max_examples=60, deadline=None)
def test_eigenvectors_of_any_graph(data, k, normalization):
    assert_eigenvectors(data, k, normalization)


@given(any_data(), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_loops_parallel_edges_and_directions_change_nothing(data, random):
    src, dst = data.edge_index
    loops = torch.arange(data.num_nodes).expand(2, -1)
    edges = torch.cat([data.edge_index, data.edge_index.flip(0), loops, loops], dim=1)
    order = list(range(edges.size(1)))
    random.shuffle(order)
    more = AddLaplacianEigenvectors(3)(data_of(edges[:, order], data.num_nodes))
    once = AddLaplacianEigenvectors(3)(data)
    assert torch.equal(more.laplacian_eigenvectors, once.laplacian_eigenvectors)
    assert torch.equal(data.edge_index, torch.stack([src, dst]))


def test_each_component_has_eigenvectors_of_its_own():
    parts = [path(3), data_of([], 1), path(5), of_networkx(nx.wheel_graph(6)), path(2)]
    transform = AddLaplacianEigenvectors(3)
    whole = transform(Batch.from_data_list(parts))
    alone = [transform(part) for part in parts]
    for name in ("laplacian_eigenvectors", "laplacian_eigenvectors_mask"):
        together = torch.cat([part[name] for part in alone])
        torch.testing.assert_close(whole[name], together, rtol=0, atol=1e-12)


# The first eigenvalues of this tree occur once each, and so do the largest entries.
ASYMMETRIC = data_of([[0, 1, 2, 3, 1, 5, 6, 2], [1, 2, 3, 4, 5, 6, 7, 8]], 9)


def renumbered(data, new):
    return data_of(new[data.edge_index], data.num_nodes)


@pytest.mark.parametrize("normalization", ["sym", "rw", None])
def test_numbering_the_nodes_anew_permutes_the_rows(normalization):
    transform = AddLaplacianEigenvectors(3, normalization=normalization)
    old = transform(ASYMMETRIC).laplacian_eigenvectors
    for _ in range(10):
        new = torch.randperm(9)
        values = transform(renumbered(ASYMMETRIC, new)).laplacian_eigenvectors
        torch.testing.assert_close(values[new], old, rtol=0, atol=1e-10)


def test_numbering_a_symmetric_graph_anew_permutes_the_rows_up_to_signs():
    transform = AddLaplacianEigenvectors(4)
    old = transform(path(5)).laplacian_eigenvectors
    for _ in range(10):
        new = torch.randperm(5)
        values = transform(renumbered(path(5), new)).laplacian_eigenvectors[new]
        sign = (values * old).sum(0).sign()
        torch.testing.assert_close(values * sign, old, rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_nodes", [3, 4, 7, 40])
def test_signs_do_not_hang_on_rounding(num_nodes):
    # Both ends of a path tie for the largest entry of the first eigenvector, with opposite signs.
    values = AddLaplacianEigenvectors(1, normalization=None)(path(num_nodes)).laplacian_eigenvectors
    assert values[0] > 0
    largest = values.abs().max()
    for noise in (1e-12, -1e-12):
        disturbed = values.numpy() * (1 + noise * np.linspace(-1, 1, num_nodes)[:, None])
        assert AddLaplacianEigenvectors(1)._signs(disturbed) == 1.0
    assert largest - values[0].abs() < 1e-12


def test_the_largest_entry_is_positive():
    out = AddLaplacianEigenvectors(6)(ASYMMETRIC).laplacian_eigenvectors
    largest = out.abs().argmax(dim=0)
    assert (out[largest, torch.arange(6)] > 0).all()


def test_random_signs():
    fixed = AddLaplacianEigenvectors(3)(path(5)).laplacian_eigenvectors
    transform = AddLaplacianEigenvectors(3, sign="random")
    signs = torch.stack([transform(path(5)).laplacian_eigenvectors for _ in range(100)]) / fixed
    signs = signs[:, 0]  # the same for all nodes, but where an entry is 0
    torch.testing.assert_close(signs.abs(), torch.ones(100, 3))
    assert signs.mean(0).abs().max() < 0.4
    torch.manual_seed(5)
    first = transform(path(5)).laplacian_eigenvectors
    torch.manual_seed(5)
    assert torch.equal(transform(path(5)).laplacian_eigenvectors, first)


LARGE = {
    "path": nx.path_graph(150),
    "cycle": nx.cycle_graph(90),
    "torus": nx.grid_2d_graph(9, 9, periodic=True),
    "tree": nx.balanced_tree(2, 6),
    "hypercube": nx.hypercube_graph(7),
    "star": nx.star_graph(90),
    "complete": nx.complete_graph(80),
    "bipartite": nx.complete_bipartite_graph(40, 70),
    "random": nx.barabasi_albert_graph(120, 4, seed=0),
}


@pytest.mark.parametrize("normalization", ["sym", None])
@pytest.mark.parametrize("factorise", [0, 10**9])
@pytest.mark.parametrize("name", LARGE)
def test_large_components_whatever_the_method(name, factorise, normalization, monkeypatch):
    monkeypatch.setattr(transforms, "_DENSE", 16)
    monkeypatch.setattr(transforms, "_FACTORISE", factorise)
    data = of_networkx(LARGE[name])
    # Also where an eigenvalue occurs so often that the iteration may miss one of its vectors.
    for k in (2, 17):
        out = assert_eigenvectors(data, k, normalization, atol=1e-8)
        again = AddLaplacianEigenvectors(k, normalization=normalization)(data)
        assert torch.equal(again.laplacian_eigenvectors, out.laplacian_eigenvectors)


def test_where_the_iteration_fails_small_graphs_are_solved_all_the_same(monkeypatch):
    def fail(*arguments, **options):
        raise ArpackError(3)

    monkeypatch.setattr(transforms, "_DENSE", 5)
    monkeypatch.setattr(transforms, "eigsh", fail)
    assert_eigenvectors(path(40), 2, "sym")
    with pytest.raises(ArpackError, match="ARPACK error 3"):
        AddLaplacianEigenvectors(2)(path(41))


def test_a_component_above_the_limit_beside_small_ones():
    graph = nx.disjoint_union(nx.path_graph(600), nx.path_graph(3))
    assert_eigenvectors(of_networkx(graph), 3, "sym", atol=1e-8)


def test_laplacian_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        AddLaplacianEigenvectors(0)
    with pytest.raises(
        ValueError, match="normalization must be one of 'sym', 'rw', None, got 'l2'"
    ):
        AddLaplacianEigenvectors(2, normalization="l2")
    with pytest.raises(ValueError, match="sign must be one of 'fixed', 'random', got 'first'"):
        AddLaplacianEigenvectors(2, sign="first")


# Random walks #####################################################################################


def landing(edge_index, num_nodes, walk_length):
    """By powers of the dense matrix, parallel edges counted."""
    count = np.zeros((num_nodes, num_nodes))
    np.add.at(count, tuple(edge_index.numpy()), 1.0)
    step = count / np.maximum(count.sum(1, keepdims=True), 1.0)
    powers = [np.linalg.matrix_power(step, t + 1).diagonal() for t in range(walk_length)]
    return torch.from_numpy(np.stack(powers, axis=1))


@given(any_data(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_random_walk_of_any_graph(data, both_ways):
    edges = data.edge_index
    if both_ways:
        edges = torch.cat([edges, edges.flip(0)], dim=1)
    out = AddRandomWalk(5, undirected=both_ways)(data)
    expected = landing(edges, data.num_nodes, 5).view(data.num_nodes, 5)
    torch.testing.assert_close(out.random_walk, expected, rtol=0, atol=1e-12)


def test_random_walk_in_blocks(monkeypatch):
    case = next(case for case in ZOO if case.name == "shuffled")
    data = data_of(case.edge_index, 30)
    whole = AddRandomWalk(6)(data).random_walk
    monkeypatch.setattr(transforms, "_BLOCK", 100)  # three rows at a time
    torch.testing.assert_close(AddRandomWalk(6)(data).random_walk, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_random_walk_is_that_of_pyg_on_simple_graphs(seed):
    data = of_networkx(nx.gnp_random_graph(20, 0.15, seed=seed, directed=True))
    torch.testing.assert_close(
        AddRandomWalk(4)(data).random_walk, T.AddRandomWalkPE(4)(data).random_walk_pe
    )


def test_random_walk_by_hand():
    # 0 goes to 1 twice as often as to 2, both come straight back; PyG's transform loses an edge.
    out = AddRandomWalk(2)(data_of([[0, 0, 0, 1, 2], [1, 1, 2, 0, 0]], 3)).random_walk
    torch.testing.assert_close(out[:, 1], torch.tensor([1.0, 2 / 3, 1 / 3]))
    # Half of the walks from 0 end at 2, which has no way on; node 3 has none at all.
    out = AddRandomWalk(4)(data_of([[0, 1, 0], [1, 0, 2]], 4)).random_walk
    assert out[:, 1].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert out[:, 3].tolist() == [0.25, 0.25, 0.0, 0.0]
    # A self-loop is a way to stay.
    out = AddRandomWalk(2)(data_of([[0, 0, 1], [0, 1, 0]], 2)).random_walk
    assert out.tolist() == [[0.5, 0.75], [0.0, 0.5]]


@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_random_walk_without_edges(num_nodes):
    out = AddRandomWalk(4)(data_of([], num_nodes)).random_walk
    assert torch.equal(out, torch.zeros(num_nodes, 4))


def test_random_walk_permutes_with_the_nodes():
    new = torch.randperm(9)
    old = AddRandomWalk(5, undirected=True)(ASYMMETRIC).random_walk
    moved = AddRandomWalk(5, undirected=True)(renumbered(ASYMMETRIC, new)).random_walk
    torch.testing.assert_close(moved[new], old, rtol=0, atol=1e-12)


def test_random_walk_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match="walk_length must be at least 1, got 0"):
        AddRandomWalk(0)


# Attention edges ##################################################################################


def pairs(edge_index):
    return [tuple(edge) for edge in edge_index.t().tolist()]


def assert_attention_edges(data, out, edges, max_distance):
    own = pairs(data.edge_index)
    found = pairs(out.attention_edge_index)
    assert set(found) == set(own) | set(pairs(edges))
    assert found == sorted(set(found), key=lambda edge: (edge[1], edge[0]))
    assert out.attention_is_original.tolist() == [edge in own for edge in found]
    graph = nx.empty_graph(data.num_nodes, create_using=nx.DiGraph)
    graph.add_edges_from(own)
    lengths = dict(nx.all_pairs_shortest_path_length(graph, cutoff=max_distance))
    assert out.attention_distance.tolist() == [lengths[i].get(j, -1) for i, j in found]


@given(any_data(), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_attention_edges_of_any_graph(data, max_distance, seed):
    generator = torch.Generator().manual_seed(seed)
    edges = patterns.random(data.num_nodes, 3, generator=generator)
    out = AddAttentionEdges(lambda num_nodes: edges, max_distance=max_distance)(data)
    assert_attention_edges(data, out, edges, max_distance)


def test_attention_distance_in_blocks(monkeypatch):
    case = next(case for case in ZOO if case.name == "power law")
    data = data_of(case.edge_index[:, :120], case.num_src)
    monkeypatch.setattr(transforms, "_BLOCK", 7 * case.num_src)  # seven sources at a time
    out = AddAttentionEdges(patterns.complete, max_distance=4)(data)
    assert_attention_edges(data, out, patterns.complete(case.num_src), 4)


@pytest.mark.parametrize("num_nodes", [0, 1, 2])
def test_attention_edges_of_tiny_graphs(num_nodes):
    out = AddAttentionEdges(patterns.complete, max_distance=3)(data_of([], num_nodes))
    assert torch.equal(out.attention_edge_index, patterns.complete(num_nodes))
    assert not out.attention_is_original.any()
    own = out.attention_edge_index[0] == out.attention_edge_index[1]
    assert torch.equal(out.attention_distance, torch.where(own, 0, -1))
    assert out.attention_distance.dtype == torch.int64


def test_attention_edges_without_distances():
    out = AddAttentionEdges(functools.partial(patterns.window, left=1))(path(4))
    assert "attention_distance" not in out
    assert torch.equal(out.attention_edge_index, patterns.window(4, 1))
    assert out.attention_is_original.sum() == 3


def test_c73_encodings_are_of_the_original_graph_in_any_order():
    # A triangle with a tail, twice over one edge, and a node apart.
    data = data_of([[0, 1, 2, 2, 2], [1, 2, 0, 3, 3]], 5)
    encodings = [AddLaplacianEigenvectors(3), AddRandomWalk(4, undirected=True)]
    edges = AddAttentionEdges(patterns.complete)
    before, after = T.Compose([*encodings, edges])(data), T.Compose([edges, *encodings])(data)
    for name in ("laplacian_eigenvectors", "laplacian_eigenvectors_mask", "random_walk"):
        assert torch.equal(after[name], before[name])
        assert torch.equal(after[name], T.Compose(encodings)(data)[name])
    assert torch.equal(after.edge_index, data.edge_index)
    # On the complete graph they would have been others.
    complete = AddRandomWalk(4)(data_of(after.attention_edge_index, 5)).random_walk
    assert not torch.allclose(complete, after.random_walk)
    original = after.attention_edge_index[:, after.attention_is_original]
    assert set(pairs(original)) == set(pairs(data.edge_index))
    # What was given is not changed.
    assert sorted(data.keys()) == ["edge_index", "num_nodes"]


# Data, batches ####################################################################################


@each_transform
def test_c22_the_number_of_nodes_is_never_guessed(transform):
    edge_index = torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match=r"never guessed from the largest.*Set data\.num_nodes"):
        transform(Data(edge_index=edge_index))
    for data in (
        Data(edge_index=edge_index, num_nodes=3),
        Data(edge_index=edge_index, x=torch.zeros(3, 2)),
        Data(edge_index=edge_index, pos=torch.zeros(3, 2)),
    ):
        out = transform(data)
        sizes = {name: out[name].shape for name in set(out.keys()) - set(data.keys())}
        assert sizes
        for name, shape in sizes.items():
            assert shape[-1 if "index" in name else 0] in (3, 9)


@each_transform
def test_transforms_refuse_what_is_no_graph(transform):
    with pytest.raises(TypeError, match=r"expected a torch_geometric.data.Data, got HeteroData"):
        transform(HeteroData())
    with pytest.raises(ValueError, match="data has no edge_index"):
        transform(Data(num_nodes=3))
    with pytest.raises(IndexError, match="there are 3 sources, but its values go from 0 to 7"):
        transform(data_of([[0, 7], [1, 2]], 3))


def test_attention_edges_refuse_what_is_no_pattern():
    with pytest.raises(IndexError, match="there are 3 sources"):
        AddAttentionEdges(lambda n: torch.tensor([[n], [0]]))(path(3))
    with pytest.raises(TypeError, match="edge_index must be a tensor"):
        AddAttentionEdges(lambda n: [[0], [0]])(path(3))
    with pytest.raises(ValueError, match="max_distance must be at least 1, got 0"):
        AddAttentionEdges(patterns.complete, max_distance=0)
    data = path(3)
    data.batch = torch.tensor([0, 1, 0])
    with pytest.raises(ValueError, match=r"data\.batch must be sorted"):
        AddAttentionEdges(patterns.complete)(data)


@each_transform
def test_int32_edges_and_the_default_dtype(transform):
    data = path(4)
    expected = transform(data)
    data.edge_index = data.edge_index.int()
    out = transform(data)
    assert out.edge_index.dtype == torch.int32
    torch.set_default_dtype(torch.float32)
    single = transform(data)
    for name, value in expected.to_dict().items():
        if name != "edge_index" and isinstance(out[name], torch.Tensor):
            assert torch.equal(out[name], value)
            wanted = torch.float32 if out[name].is_floating_point() else out[name].dtype
            assert single[name].dtype == wanted


def test_a_repr_tells_what_a_stored_data_set_was_made_with():
    assert repr(AddLaplacianEigenvectors(3, sign="random", attr_name="pe")) == (
        "AddLaplacianEigenvectors(3, normalization='sym', attr_name='pe', sign='random')"
    )
    assert repr(AddRandomWalk(8)) == ("AddRandomWalk(8, undirected=False, attr_name='random_walk')")
    edges = AddAttentionEdges(patterns.causal, max_distance=2)
    assert repr(edges).startswith("AddAttentionEdges(<function causal")
    assert repr(edges).endswith("max_distance=2)")


def test_names_of_the_results():
    data = T.Compose(
        [AddLaplacianEigenvectors(2, attr_name="pe"), AddRandomWalk(2, attr_name="rw")]
    )(path(3))
    assert sorted(data.keys()) == ["edge_index", "num_nodes", "pe", "pe_mask", "rw"]


GRAPHS = [path(4), data_of([], 1), of_networkx(nx.cycle_graph(5)), data_of([], 0), path(2)]
ALL = T.Compose(
    [
        AddAttentionEdges(patterns.complete, max_distance=3),
        AddLaplacianEigenvectors(3),
        AddRandomWalk(4),
    ]
)


def test_loaders_put_graphs_side_by_side():
    graphs = [ALL(data) for data in GRAPHS]
    batch = next(iter(DataLoader(graphs, batch_size=len(graphs))))
    starts = np.cumsum([0] + [data.num_nodes for data in GRAPHS])
    edges = [data.attention_edge_index + start for data, start in zip(graphs, starts, strict=False)]
    assert torch.equal(batch.attention_edge_index, torch.cat(edges, dim=1))
    for name in (
        "attention_is_original",
        "attention_distance",
        "laplacian_eigenvectors",
        "laplacian_eigenvectors_mask",
        "random_walk",
    ):
        assert torch.equal(batch[name], torch.cat([data[name] for data in graphs])), name
    back = batch.to_data_list()
    for data, original in zip(back, graphs, strict=True):
        assert torch.equal(data.attention_edge_index, original.attention_edge_index)
        assert torch.equal(data.attention_distance, original.attention_distance)


def test_c38_a_batch_is_transformed_as_its_graphs():
    whole = ALL(Batch.from_data_list(GRAPHS))
    loaded = next(iter(DataLoader([ALL(data) for data in GRAPHS], batch_size=len(GRAPHS))))
    src, dst = whole.attention_edge_index
    assert torch.equal(whole.batch[src], whole.batch[dst])
    for name, value in loaded.to_dict().items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-12)


def test_encodings_go_from_the_loader_into_a_layer():
    torch.set_default_dtype(torch.float32)
    encoding, bias = LaplacianEncoding(3, 8), ShortestPathBias(2, 3)
    layer = GraphTransformerLayer(8, 2, 16, dropout=0.0)
    modules = torch.nn.ModuleList([encoding, bias, layer]).eval()

    def run(data):
        x = torch.ones(data.num_nodes, 8) + encoding(
            data.laplacian_eigenvectors, data.laplacian_eigenvectors_mask, data.batch
        )
        graph = Graph(data.attention_edge_index, data.num_nodes)
        return layer(x, graph, bias=bias(data.attention_distance))

    graphs = [ALL(data) for data in GRAPHS]
    batch = next(iter(DataLoader(graphs, batch_size=len(graphs))))
    out = run(batch)
    torch.testing.assert_close(out, torch.cat([run(data) for data in graphs]))
    # Nodes of one path differ though their features are the same.
    assert out[:4].unique(dim=0).size(0) == 4
    modules.train()
    run(batch).square().sum().backward()
    assert all(parameter.grad is not None for parameter in modules.parameters())
