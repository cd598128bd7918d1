"""Conversion from and to networkx."""

from collections import Counter

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from graphattn.data import (
    from_networkx,
    to_networkx,
)

# networkx


def test_c83_from_networkx_maps_labels_in_node_order():
    graph = nx.DiGraph()
    graph.add_nodes_from([4, 2, 6])
    graph.add_edges_from([(2, 6), (4, 2)])
    data, nodes = from_networkx(graph)
    assert nodes == [4, 2, 6]
    assert sorted(data.edge_index.t().tolist()) == [[0, 1], [1, 2]]
    assert data.edge_index.dtype == torch.int64
    back = to_networkx(data, nodes=nodes)
    assert nx.utils.graphs_equal(back, graph)
    assert list(back) == [4, 2, 6]
    assert list(to_networkx(data)) == [0, 1, 2]


def test_c83_c84_round_trip_of_mixed_labels_and_attributes():
    graph = nx.Graph()
    for i, label in enumerate(["b", ("c", 1), 7, None.__class__, 2.5]):
        graph.add_node(label, x=[float(i), 1.0], size=i)
    graph.add_edge("b", ("c", 1), x=3)
    graph.add_edge(7, 7, x=4)
    data, nodes = from_networkx(graph, node_attrs=["size", "x"], edge_attrs="x")
    assert data.x.tolist() == [[i, i, 1] for i in range(5)]
    assert data.edge_index.tolist() == [[0, 1, 2], [1, 0, 2]]  # the self-loop once
    assert data.edge_attr.tolist() == [[3], [3], [4]]
    back = to_networkx(data, nodes=nodes, node_attrs="x", edge_attrs=["edge_attr"], undirected=True)
    assert list(back) == list(graph)
    assert set(back.edges) == set(graph.edges)
    assert back.nodes[7] == {"x": [2.0, 2.0, 1.0]}
    assert back.edges["b", ("c", 1)] == {"edge_attr": [3.0]}


def test_c34_from_networkx_direction():
    data, _ = from_networkx(nx.DiGraph([("source", "target")]))
    assert data.edge_index.tolist() == [[0], [1]]


def test_c36_parallel_edges_are_kept():
    graph = nx.MultiDiGraph()
    graph.add_nodes_from([0, 1, 2])
    graph.add_edge(0, 1, w=1.0)
    graph.add_edge(0, 1, w=2.0)
    graph.add_edge(2, 1, w=3.0)
    data, nodes = from_networkx(graph, edge_attrs="w")
    assert data.edge_index.tolist() == [[0, 0, 2], [1, 1, 1]]
    assert data.edge_attr.flatten().tolist() == [1, 2, 3]
    with pytest.raises(
        ValueError, match=r"1 parallel edges would be lost: \(0, 1\)\. Pass multigraph"
    ):
        to_networkx(data, nodes=nodes)
    back = to_networkx(data, nodes=nodes, edge_attrs="edge_attr", multigraph=True)
    assert [back.edges[0, 1, k]["edge_attr"] for k in (0, 1)] == [[1.0], [2.0]]


def test_c84_missing_attributes_are_listed():
    graph = nx.path_graph(3)
    nx.set_node_attributes(graph, {0: 1.0, 2: 3.0}, "x")
    nx.set_edge_attributes(graph, {(0, 1): 5}, "w")
    with pytest.raises(
        ValueError, match=r"node attribute 'x' is missing on 1 of 3 nodes: 1\. Set it"
    ):
        from_networkx(graph, node_attrs="x")
    with pytest.raises(
        ValueError, match=r"edge attribute 'w' is missing on 1 of 2 edges: \(1, 2\)"
    ):
        from_networkx(graph, edge_attrs=["w"])
    data, _ = from_networkx(graph, node_attrs="x", edge_attrs="w", fill=-1.0)
    assert data.x.tolist() == [[1], [-1], [3]]
    assert data.edge_attr.tolist() == [[5], [5], [-1], [-1]]
    data, _ = from_networkx(graph)
    assert "x" not in data
    assert "edge_attr" not in data
    with pytest.raises(ValueError, match=r"missing on 30 of 30 nodes: 0, .*, 9 and 20 more"):
        from_networkx(nx.path_graph(30), node_attrs="x")
    data, _ = from_networkx(nx.path_graph(3), node_attrs="x", fill=0.5)
    assert data.x.tolist() == [[0.5]] * 3


def test_c84_odd_attributes():
    graph = nx.Graph()
    graph.add_node("a", t=torch.tensor([1.0, 2.0]), s="text")
    graph.nodes["a"][0] = True  # an integer key
    graph.add_node("b", t=np.array([3, 4]), s=1)
    graph.nodes["b"][0] = np.float64(2.0)
    data, _ = from_networkx(graph, node_attrs=[0, "t"])
    assert data.x.tolist() == [[1, 1, 2], [2, 3, 4]]
    assert from_networkx(graph, node_attrs=0)[0].x.tolist() == [[1], [2]]
    with pytest.raises(TypeError, match=r"'s' must be a number .* on 'a' it is 'text' \(str\)"):
        from_networkx(graph, node_attrs="s")
    graph.nodes["b"]["t"] = [1, 2, 3]
    with pytest.raises(
        ValueError, match=r"must have one size; it is 2 on the first node but not on 'b'"
    ):
        from_networkx(graph, node_attrs="t")
    graph.nodes["b"]["t"] = [[1], [2, 3]]
    with pytest.raises(TypeError, match="flat sequence of numbers"):
        from_networkx(graph, node_attrs="t")
    with pytest.raises(TypeError, match="must be a networkx graph, got dict"):
        from_networkx({"a": ["b"]})


def test_c84_graph_without_edges_or_nodes():
    data, nodes = from_networkx(nx.empty_graph(3), node_attrs=[], edge_attrs=["w", "v"])
    assert data.edge_index.shape == (2, 0)
    assert data.edge_index.dtype == torch.int64
    assert data.num_nodes == 3
    assert data.edge_attr.shape == (0, 2)
    assert data.x.shape == (3, 0)
    assert list(to_networkx(data, nodes=nodes)) == nodes
    data, nodes = from_networkx(nx.Graph(), node_attrs="x")
    assert (data.num_nodes, nodes, data.x.shape) == (0, [], (0, 1))
    assert len(to_networkx(data, nodes=nodes)) == 0


def test_c22_to_networkx_never_guesses_the_number_of_nodes():
    data = Data(edge_index=torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match="number of nodes is unknown"):
        to_networkx(data)
    assert list(to_networkx(data, nodes="abc")) == ["a", "b", "c"]
    data.num_nodes = 3
    assert len(to_networkx(data)) == 3


def test_to_networkx_errors():
    data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3, y=torch.arange(3))
    with pytest.raises(ValueError, match="data has no edge_index"):
        to_networkx(Data(num_nodes=3))
    with pytest.raises(ValueError, match="one label per node, 3, got 2"):
        to_networkx(data, nodes=["a", "b"])
    with pytest.raises(ValueError, match=r"must not repeat a label, got twice: 'a'\."):
        to_networkx(data, nodes=["a", "b", "a"])
    with pytest.raises(
        ValueError, match=r"both directions; without reverse: \('a', 'b'\), \('b', 'c'\)"
    ):
        to_networkx(data, nodes=["a", "b", "c"], undirected=True)
    with pytest.raises(ValueError, match=r"'x' must be a tensor .* per node, 3, got no such field"):
        to_networkx(data, node_attrs="x")
    with pytest.raises(ValueError, match=r"'y' must be a tensor .* per edge, 2, got \(3,\)"):
        to_networkx(data, edge_attrs="y")
    data.name = "text"
    with pytest.raises(ValueError, match="got str"):
        to_networkx(data, node_attrs="name")
    assert to_networkx(data, node_attrs=["y"]).nodes[2] == {"y": 2}
    data.edge_index = torch.tensor([[0, 1], [1, 0]])
    data.edge_attr = torch.tensor([1, 2])
    with pytest.raises(
        ValueError, match=r"equal attributes in both directions; they differ for \(0, 1\)"
    ):
        to_networkx(data, edge_attrs="edge_attr", undirected=True)
    data.edge_index = torch.tensor([[0, 1], [1, 3]])
    with pytest.raises(IndexError, match=r"must lie in 0\.\.2, got 0\.\.3"):
        to_networkx(data)


LABELS = st.one_of(
    st.integers(-3, 10**12), st.text(max_size=3), st.tuples(st.integers(0, 3), st.text(max_size=2))
)


@settings(deadline=None, max_examples=80)
@given(
    labels=st.lists(LABELS, unique=True, max_size=8),
    pairs=st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 99)), max_size=20
    ),
    directed=st.booleans(),
    multigraph=st.booleans(),
)
def test_c83_round_trip_of_random_graphs(labels, pairs, directed, multigraph):
    kinds = {(False, False): nx.Graph, (True, False): nx.DiGraph,
             (False, True): nx.MultiGraph, (True, True): nx.MultiDiGraph}  # fmt: skip
    graph = kinds[directed, multigraph]()
    graph.add_nodes_from(labels)
    for u, v, weight in pairs:
        if max(u, v) < len(labels):
            graph.add_edge(labels[u], labels[v], weight=weight)
    data, nodes = from_networkx(graph, edge_attrs="weight")
    assert data.num_nodes == len(labels)
    loops = sum(u == v for u, v in graph.edges())
    edges = graph.number_of_edges()
    assert data.num_edges == (edges if directed else 2 * edges - loops)
    back = to_networkx(
        data, nodes=nodes, edge_attrs="edge_attr", undirected=not directed, multigraph=multigraph
    )
    assert type(back) is type(graph)
    assert list(back) == list(graph)

    def count(graph, value):
        return Counter(
            ((u, v) if directed else frozenset((u, v)), value(values))
            for u, v, values in graph.edges(data=True)
        )

    assert count(back, lambda a: a["edge_attr"][0]) == count(graph, lambda a: a["weight"])
