"""graphattn.Graph: what comes in, what it holds, what it refuses, and how often it sorts."""

import copy
import pickle
import weakref

import pytest
import torch
import torch_geometric.utils
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric import EdgeIndex

from graphattn import Graph, _native, attention_weights, dense_attention, graph_attention
from graphattn.testing import zoo

SHUFFLED = torch.tensor([[3, 0, 2, 0, 1, 0], [2, 1, 2, 0, 1, 1]])


@pytest.fixture
def count_sorts(monkeypatch):
    """What was called of torch's and our own functions that sort ("sort"), and of PyG's."""
    calls = []

    def count(module, name, called="sort"):
        function = getattr(module, name)

        def counted(*args, **kwargs):
            if not kwargs.get("in_order"):
                calls.append(called)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(torch, "sort")
    count(torch, "argsort")
    count(torch.Tensor, "sort")
    count(torch.Tensor, "argsort")
    count(torch_geometric.utils, "index_sort", "index_sort")
    count(_native, "sort_by_target")
    count(_native, "sort_by_source")
    return calls


def features(num_src, num_dst=None, heads=2, dim=4):
    num_dst = num_src if num_dst is None else num_dst
    return (
        torch.randn(num_dst, heads, dim),
        torch.randn(num_src, heads, dim),
        torch.randn(num_src, heads, dim),
    )


def edge_set(graph):
    return sorted(map(tuple, graph.edge_index.t().tolist()))


# What it holds ####################################################################################


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("case", list(zoo(hub=50)), ids=str)
def test_arrays_by_target_and_by_source_describe_the_edges(case, dtype):
    edge_index = case.edge_index.to(dtype)
    graph = Graph(edge_index, (case.num_src, case.num_dst))
    num_edges = case.edge_index.size(1)
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (
        case.num_src,
        case.num_dst,
        num_edges,
    )
    assert torch.equal(graph.edge_index, case.edge_index)

    src, dst = case.edge_index
    every = torch.arange(num_edges)
    edge_id = every if graph.edge_id is None else graph.edge_id
    assert edge_id.sort().values.equal(every)
    assert graph.dst_ptr.dtype == graph.src_index.dtype == torch.int64
    assert graph.dst_ptr.tolist() == [int((dst < i).sum()) for i in range(case.num_dst + 1)]
    assert graph.src_index.equal(src[edge_id])
    assert graph.target.equal(dst[edge_id])
    assert graph.in_degree().equal(torch.bincount(dst, minlength=case.num_dst))

    assert graph.edge_id_by_src.sort().values.equal(every)
    assert graph.src_ptr.tolist() == [int((src < i).sum()) for i in range(case.num_src + 1)]
    assert src[graph.edge_id_by_src].equal(src.sort().values)
    assert graph.dst_index.equal(dst[graph.edge_id_by_src])
    assert graph.out_degree().equal(torch.bincount(src, minlength=case.num_src))


def test_edges_of_one_target_keep_the_callers_order():
    graph = Graph(torch.tensor([[4, 3, 9, 3], [7, 2, 7, 7]]), 10)
    assert graph.src_index.tolist() == [3, 4, 9, 3]
    assert graph.edge_id.tolist() == [1, 0, 2, 3]


def test_edges_already_by_target_are_not_sorted(count_sorts):
    graph = Graph(torch.tensor([[5, 1, 1, 0], [0, 0, 3, 5]]), 6)
    assert graph.edge_id is None
    assert count_sorts == []


def test_c34_the_single_edge_0_to_1_lets_node_1_attend_to_node_0(backend):
    graph = Graph(torch.tensor([[0], [1]]), num_nodes=2)
    query, key, value = features(2)
    out = graph_attention(query, key, value, graph, backend=backend)
    assert out[0].eq(0).all()
    assert torch.equal(out[1], value[0])
    assert graph.in_degree().tolist() == [0, 1]
    assert graph.out_degree().tolist() == [1, 0]
    # the same in a dense mask, a sparse matrix and the dense reference
    mask = torch.tensor([[False, False], [True, False]])
    assert torch.equal(Graph.from_mask(mask).edge_index, graph.edge_index)
    assert torch.equal(Graph.from_sparse(mask.float().to_sparse()).edge_index, graph.edge_index)
    torch.testing.assert_close(dense_attention(query, key, value, mask)[0], out)
    torch.testing.assert_close(dense_attention(query, key, value, graph)[0], out)


def test_an_edge_index_of_any_memory_layout_gives_the_same_graph():
    pairs = torch.tensor([[0, 1], [0, 2], [3, 2], [3, 3]])  # a list of edges, turned: [2, E]
    assert not pairs.t()[0].is_contiguous()
    for edge_index in (pairs.t(), pairs.flip(0).t(), pairs.t().repeat(1, 2)[:, ::2]):
        graph = Graph(edge_index, 4)
        assert torch.equal(graph.edge_index, edge_index)
        assert torch.equal(graph.dst_ptr, Graph(edge_index.contiguous(), 4).dst_ptr)


def test_repr():
    edge_index = torch.tensor([[0], [1]])
    assert repr(Graph(edge_index, 3)) == "Graph(num_nodes=3, num_edges=1)"
    assert repr(Graph(edge_index, (1, 2))) == "Graph(num_src=1, num_dst=2, num_edges=1)"
    meta = Graph(edge_index, 3).to("meta")
    assert repr(meta) == "Graph(num_nodes=3, num_edges=1, device='meta')"


def test_frozen():
    graph = Graph(SHUFFLED, 4)
    with pytest.raises(AttributeError, match=r"Graph is frozen: cannot set num_src. Build a"):
        graph.num_src = 5
    with pytest.raises(AttributeError, match=r"Graph is frozen: cannot delete dst_ptr. Build a"):
        del graph.dst_ptr


@pytest.mark.parametrize("edge_index", [SHUFFLED, SHUFFLED[:, SHUFFLED[1].argsort(stable=True)]])
def test_a_change_of_the_callers_tensor_does_not_reach_the_graph(edge_index):
    mine = edge_index.clone()
    graph = Graph(mine, 4)
    mine.fill_(0)
    assert torch.equal(graph.edge_index, edge_index)


@pytest.mark.parametrize("lazy_parts", [False, True])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_pickle_and_deepcopy(clone, lazy_parts):
    graph = Graph(SHUFFLED, (5, 4))
    if lazy_parts:
        _ = graph.edge_index, graph.src_ptr, graph.reverse()
    again = clone(graph)
    assert again is not graph
    assert again.src_index.data_ptr() != graph.src_index.data_ptr()
    assert repr(again) == repr(graph)
    assert torch.equal(again.edge_index, graph.edge_index)
    assert torch.equal(again.edge_id_by_src, graph.edge_id_by_src)
    with pytest.raises(AttributeError, match="frozen"):
        again.num_src = 5


def test_to_returns_itself_on_the_same_device_and_moves_every_array_otherwise():
    graph = Graph(SHUFFLED, 4)
    assert graph.to("cpu") is graph
    assert graph.to(torch.device("cpu")) is graph
    by_target_only = graph.to("meta")
    assert "_by_source" not in by_target_only._kept
    _ = graph.src_ptr
    moved = graph.to("meta")
    assert "_by_source" in moved._kept
    for name in ("dst_ptr", "src_index", "edge_id", "src_ptr", "dst_index", "edge_id_by_src"):
        assert getattr(moved, name).device.type == "meta", name
        assert getattr(moved, name).shape == getattr(graph, name).shape, name
    assert moved.to("meta") is moved
    assert Graph(torch.tensor([[0], [1]]), 2).to("meta").edge_id is None


# What it refuses ##################################################################################


def test_c22_num_nodes_is_never_guessed():
    edge_index = torch.tensor([[0], [1]])
    with pytest.raises(
        TypeError,
        match=r"num_nodes is missing\. It is never guessed .* Give the number of nodes, or "
        r"\(num_src, num_dst\)",
    ):
        Graph(edge_index)
    with pytest.raises(TypeError, match="num_nodes is missing"):
        Graph(EdgeIndex(edge_index, sparse_size=(2, None)))


def test_c22_isolated_last_nodes_stay(backend):
    edge_index = torch.tensor([[0], [1]])
    query, key, value = features(3)
    assert graph_attention(query, key, value, edge_index, backend=backend).shape == (3, 2, 4)
    shifted = Graph.batch([Graph(edge_index, 3), Graph(edge_index, 3)])
    assert shifted.edge_index.tolist() == [[0, 3], [1, 4]]


@pytest.mark.parametrize(
    ("edge_index", "num_nodes", "text"),
    [
        ([[0, 11], [1, 1]], 3, r"edge_index\[0\] holds source .* 3 sources, .* from 0 to 11\."),
        ([[0, 1], [11, 1]], 3, r"edge_index\[1\] holds target .* 3 targets, .* from 1 to 11\."),
        ([[0, -1], [1, 1]], 3, r"edge_index\[0\] holds source .* 3 sources, .* from -1 to 0\."),
        ([[0, 1], [1, -1]], 3, r"edge_index\[1\] holds target .* 3 targets, .* from -1 to 1\."),
        ([[2], [0]], (2, 3), r"edge_index\[0\] holds source .* 2 sources, .* from 2 to 2\."),
        ([[0], [3]], (9, 3), r"edge_index\[1\] holds target .* 3 targets, .* from 3 to 3\."),
        ([[0], [0]], (0, 1), r"0 sources"),
        ([[0], [0]], (1, 0), r"0 targets"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_c24_index_out_of_range(edge_index, num_nodes, text, dtype):
    edge_index = torch.tensor(edge_index, dtype=dtype)
    with pytest.raises(IndexError, match=text):
        Graph(edge_index, num_nodes)


def test_c24_the_check_is_made_by_the_operator_too_and_can_be_switched_off(monkeypatch):
    edge_index = torch.tensor([[0], [3]])
    with pytest.raises(IndexError, match=r"edge_index\[1\] .* 3 targets"):
        graph_attention(*features(3), edge_index)
    monkeypatch.setattr(torch, "aminmax", None)  # it would be called
    Graph(torch.tensor([[0], [2]]), 3, validate=False)


def test_c25_raw_identifiers():
    with pytest.raises(
        IndexError,
        match=r"from 1000000000 to 1000000001\. Pass the right num_nodes, or map raw identifiers "
        r"to positions with graphattn\.data\.relabel\(edge_index\)",
    ):
        Graph(torch.tensor([[10**9], [0]]) + torch.tensor([[0, 1], [0, 0]]), 2)


def test_c25_the_advice_exists():
    from graphattn.data import relabel

    assert callable(relabel)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bool, torch.uint8, torch.int16, torch.complex64]
)
def test_c26_other_dtypes_are_refused_by_name(dtype):
    edge_index = torch.zeros(2, 3, dtype=dtype)
    text = rf"edge_index must be int64 or int32, got {dtype}\. Use edge_index\.long\(\)"
    with pytest.raises(TypeError, match=text):
        Graph(edge_index, 3)
    with pytest.raises(TypeError, match=text):
        graph_attention(*features(3), edge_index)


def test_c26_int32_is_converted_once_and_remembered(count_sorts):
    edge_index = SHUFFLED.int()
    first = Graph.of(edge_index, 4)
    assert first.src_index.dtype == torch.int64
    assert Graph.of(edge_index, 4) is first
    assert count_sorts == ["sort"]


@pytest.mark.parametrize(
    ("edge_index", "text"),
    [
        (torch.zeros(3, 2, dtype=torch.long), r"got \(3, 2\)\. Use edge_index\.t\(\)\."),
        (torch.zeros(3, 5, dtype=torch.long), r"must have shape \(2, num_edges\), got \(3, 5\)\.$"),
        (torch.zeros(2, dtype=torch.long), r"got \(2,\)\.$"),
        (torch.zeros(2, 3, 1, dtype=torch.long), r"got \(2, 3, 1\)\.$"),
    ],
)
def test_wrong_shape(edge_index, text):
    with pytest.raises(ValueError, match=text):
        Graph(edge_index, 3)


def test_no_tensor_or_the_wrong_kind():
    with pytest.raises(
        TypeError,
        match=r"edge_index must be a tensor \[2, num_edges\], got list\. Use torch\.as_tensor",
    ):
        Graph([[0], [1]], 2)
    with pytest.raises(TypeError, match=r"got a torch sparse tensor\. Use Graph\.from_sparse"):
        Graph(torch.eye(2).to_sparse(), 2)
    with pytest.raises(
        TypeError, match=r"Graph\.of: expected a Graph, an edge_index .* or a torch sparse .* list"
    ):
        Graph.of([[0], [1]], 2)
    with pytest.raises(
        TypeError, match=r"Graph\.from_sparse: expected .* \(COO, CSR or CSC\), got a torch.float32"
    ):
        Graph.from_sparse(torch.eye(2))
    with pytest.raises(TypeError, match=r"Graph\.from_sparse: .* got NoneType\. Use Graph\("):
        Graph.from_sparse(None)
    with pytest.raises(
        TypeError,
        match=r"Graph\.from_mask: allowed must be a bool tensor .* got a torch\.float32 tensor of "
        r"shape \(2, 2\)",
    ):
        Graph.from_mask(torch.eye(2))
    with pytest.raises(TypeError, match=r"Graph\.from_mask: .* of shape \(2,\)"):
        Graph.from_mask(torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"Graph\.batch: expected at least one graph, got none"):
        Graph.batch([])


@pytest.mark.parametrize("num_nodes", [-1, (2, -1), (-1, 2)])
def test_negative_num_nodes(num_nodes):
    with pytest.raises(ValueError, match="num_nodes must not be negative, got"):
        Graph(torch.zeros(2, 0, dtype=torch.long), num_nodes)


def test_of_refuses_a_graph_of_another_size():
    graph = Graph(SHUFFLED, (5, 4))
    assert Graph.of(graph, (5, 4)) is graph
    with pytest.raises(
        ValueError, match=r"has 5 sources and 4 targets, but the features have 4 and 4"
    ):
        Graph.of(graph, 4)
    with pytest.raises(ValueError, match=r"has 2 sources and 2 targets, but the features"):
        Graph.of(torch.eye(2).to_sparse(), 3)


# Other ways in ####################################################################################


def stored(dense, layout):
    return {
        "coo": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
    }[layout]()


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_from_sparse_row_i_attends_to_its_columns(layout, backend):
    dense = torch.tensor([[0.0, 1, 2], [0, 0, 0], [3, 0, 4], [5, 6, 0]])  # 4 targets, 3 sources
    adj_t = stored(dense, layout)
    graph = Graph.from_sparse(adj_t)
    assert (graph.num_src, graph.num_dst) == (3, 4)
    dst, src = dense.nonzero(as_tuple=True)
    assert edge_set(graph) == sorted(zip(src.tolist(), dst.tolist(), strict=True))
    # edges keep the order in which they are stored
    values = adj_t._values() if layout == "coo" else adj_t.values()
    src, dst = graph.edge_index
    assert torch.equal(dense[dst, src], values)
    query, key, value = features(3, 4)
    expected, _ = dense_attention(query, key, value, dense != 0)
    actual = graph_attention(query, key, value, adj_t, backend=backend)
    torch.testing.assert_close(actual, expected)


def test_from_sparse_uncoalesced_entries_are_parallel_edges_and_stored_zeros_are_edges():
    indices = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 2]])
    values = torch.tensor([1.0, 0.0, 2.0, 3.0])
    adj_t = torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=True)
    assert not adj_t.is_coalesced()
    assert torch.equal(Graph.from_sparse(adj_t).edge_index, indices.flip(0))


def test_from_sparse_validates():
    adj_t = torch.sparse_coo_tensor(
        torch.tensor([[5], [0]]), torch.ones(1), (2, 2), check_invariants=False
    )
    with pytest.raises(IndexError, match=r"edge_index\[1\] .* 2 targets"):
        Graph.from_sparse(adj_t)


def test_from_mask():
    mask = torch.rand(4, 6) < 0.5
    graph = Graph.from_mask(mask)
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (6, 4, int(mask.sum()))
    src, dst = graph.edge_index
    assert mask[dst, src].all()
    assert graph.edge_id is None  # row-major order is by target already


def test_from_mask_batched_puts_sequences_side_by_side(backend):
    mask = torch.rand(3, 4, 5) < 0.6
    query, key, value = (torch.randn(3, n, 2, 4) for n in (4, 5, 5))
    graph = Graph.from_mask(mask)
    assert (graph.num_src, graph.num_dst) == (15, 12)
    out = graph_attention(
        query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), graph, backend=backend
    )
    expected, _ = dense_attention(query, key, value, mask.unsqueeze(1))
    torch.testing.assert_close(out.view(3, 4, 2, 4), expected)


def test_c86_pairs_are_batched_with_offsets_of_their_own():
    pairs = [
        Graph(torch.tensor([[1, 0], [2, 1]]), (2, 3)),
        Graph(torch.tensor([[3], [0]]), (4, 1)),
    ]
    batch = Graph.batch(pairs)
    assert (batch.num_src, batch.num_dst) == (6, 4)
    assert batch.edge_index.tolist() == [[1, 0, 5], [2, 1, 3]]
    assert repr(Graph.batch(pairs[:1])) == repr(pairs[0])


@pytest.mark.parametrize("case", list(zoo(hub=50)), ids=str)
def test_reverse(case):
    graph = case.graph()
    turned = graph.reverse()
    assert (turned.num_src, turned.num_dst) == (graph.num_dst, graph.num_src)
    assert torch.equal(turned.edge_index, case.edge_index.flip(0))  # the caller's order stays
    fresh = Graph(case.edge_index.flip(0), (case.num_dst, case.num_src))
    assert torch.equal(turned.dst_ptr, fresh.dst_ptr)
    assert torch.equal(turned.src_ptr, fresh.src_ptr)
    twice = turned.reverse()
    assert (twice.num_src, twice.num_dst) == (graph.num_src, graph.num_dst)
    assert torch.equal(twice.edge_index, graph.edge_index)
    assert torch.equal(twice.dst_ptr, graph.dst_ptr)
    assert graph.reverse() is turned


def test_c35_reverse_with_unequal_sides(backend):
    graph = Graph(torch.tensor([[0, 1, 1], [2, 2, 0]]), (2, 3))
    query, key, value = features(3, 2)  # the sides change places
    out = graph_attention(query, key, value, graph.reverse(), backend=backend)
    expected, _ = dense_attention(
        query, key, value, torch.tensor([[False, False, True], [True, False, True]])
    )
    torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match="has 3 sources and 2 targets"):
        graph_attention(key, query, query, graph.reverse(), backend=backend)


def test_c32_self_loops_are_added_only_on_request_and_at_the_end(backend):
    graph = Graph(torch.tensor([[2, 0], [1, 0]]), 3)
    looped = graph.add_self_loops()
    assert looped.edge_index.tolist() == [[2, 0, 0, 1, 2], [1, 0, 0, 1, 2]]
    assert graph.num_edges == 2
    query, key, value = features(3)
    assert graph_attention(query, key, value, graph, backend=backend)[2].eq(0).all()
    out = graph_attention(query, key, value, looped, backend=backend)
    torch.testing.assert_close(out[2], value[2])


def test_c32_self_loops_of_two_node_sets_are_refused():
    graph = Graph(torch.tensor([[0], [2]]), (2, 3))
    with pytest.raises(
        ValueError, match=r"sources \(2\) and targets \(3\) are different nodes, so"
    ):
        graph.add_self_loops()


# PyG's EdgeIndex ##################################################################################


def edge_index_of(order, edge_index=SHUFFLED, size=(4, 4)):
    by = {"col": 1, "row": 0}[order]
    edge_index = edge_index[:, edge_index[by].argsort(stable=True)]
    return EdgeIndex(edge_index, sparse_size=size, sort_order=order).validate()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("order", ["col", "row"])
def test_edge_index_lends_its_pointers(order, filled, dtype, count_sorts):
    lender = edge_index_of(order, SHUFFLED.to(dtype))
    if filled:
        lender.fill_cache_()
    count_sorts.clear()
    graph = Graph(lender)
    if order == "col" or filled:
        assert count_sorts == []
    else:
        assert count_sorts.count("index_sort") == 1
    plain = lender.as_tensor().long()
    fresh = Graph(plain, 4)
    assert torch.equal(graph.edge_index, plain)
    for name in ("dst_ptr", "src_ptr"):
        assert torch.equal(getattr(graph, name), getattr(fresh, name))
        assert getattr(graph, name).dtype == torch.int64
    assert (graph.edge_id is None) == (order == "col")
    # what was computed for the graph stays with the lender
    count_sorts.clear()
    Graph(lender)
    assert count_sorts == []


@pytest.mark.parametrize("order", ["col", "row"])
def test_edge_index_and_tensor_give_the_same_attention(order, backend):
    lender = edge_index_of(order)
    query, key, value = features(4)
    plain = lender.as_tensor().clone()
    bias = torch.randn(6, 2)
    torch.testing.assert_close(
        graph_attention(query, key, value, lender, bias=bias, backend=backend),
        graph_attention(query, key, value, plain, bias=bias, backend=backend),
    )


def test_edge_index_unsorted_or_of_unknown_size_is_sorted_here():
    assert torch.equal(Graph(EdgeIndex(SHUFFLED, sparse_size=(4, 4))).edge_index, SHUFFLED)
    by_col = SHUFFLED[:, SHUFFLED[1].argsort()]
    graph = Graph(EdgeIndex(by_col, sort_order="col"), 7)  # nodes 4, 5, 6 are isolated
    assert graph.dst_ptr.tolist() == [0, 1, 4, 6, 6, 6, 6, 6]


def test_edge_index_that_lies_about_its_order_is_refused():
    text = r"says that it is sorted \(sort_order=.*{}.*\), but it is not\. Sort it with"
    with pytest.raises(ValueError, match=text.format("col")):
        Graph(EdgeIndex(SHUFFLED, sparse_size=(4, 4), sort_order="col"))
    with pytest.raises(ValueError, match=text.format("row")):
        Graph(EdgeIndex(SHUFFLED, sparse_size=(4, 4), sort_order="row"))


@pytest.mark.parametrize("num_nodes", [5, (4, 5), (5, 4)])
@pytest.mark.parametrize("size", [(4, 4), (4, None), (None, 4)])
def test_edge_index_of_another_size_is_refused(size, num_nodes):
    pair = num_nodes if isinstance(num_nodes, tuple) else (num_nodes, num_nodes)
    edge_index = EdgeIndex(SHUFFLED, sparse_size=size)
    if all(own in (None, given) for own, given in zip(size, pair, strict=True)):
        assert Graph(edge_index, num_nodes).num_edges == 6
        return
    with pytest.raises(ValueError, match=r"num_nodes is \(\d, \d\), but the EdgeIndex has spar"):
        Graph(edge_index, num_nodes)


def test_a_change_of_an_edge_index_does_not_reach_the_graph():
    lender = edge_index_of("col")
    before = lender.as_tensor().clone()
    graph = Graph.of(lender, 4)
    lender[0, 0] = 3 - lender[0, 0]
    assert torch.equal(graph.edge_index, before)
    assert torch.equal(Graph.of(lender, 4).edge_index, lender.as_tensor())


# The weak cache ###################################################################################


def test_ten_layers_sort_once(count_sorts, backend):
    edge_index = SHUFFLED.clone()
    x = torch.randn(4, 2, 4, requires_grad=True)
    out = x
    for _ in range(10):
        out = graph_attention(out, out, out, edge_index, backend=backend)
    attention_weights(out, out, edge_index, backend=backend)
    out.sum().backward()
    # by target, and by source where the backend sums at sources
    expected = {"eager": 1, "scatter": 2, "cpu": 2}.get(backend, len(count_sorts))
    assert count_sorts == ["sort"] * expected
    assert len(count_sorts) <= 2


def test_each_size_has_a_graph_of_its_own():
    edge_index = SHUFFLED.clone()
    square, wide = Graph.of(edge_index, 4), Graph.of(edge_index, (9, 4))
    assert (wide.num_src, wide.num_dst) == (9, 4)
    assert Graph.of(edge_index, 4) is square
    assert Graph.of(edge_index, (4, 4)) is square
    assert Graph.of(edge_index, (9, 4)) is wide
    assert Graph.of(edge_index.clone(), 4) is not square


def test_an_in_place_change_is_noticed(backend):
    edge_index = torch.tensor([[0, 1], [2, 2]])
    query, key, value = features(3)
    graph_attention(query, key, value, edge_index, backend=backend)
    edge_index[0, 1] = 0
    assert Graph.of(edge_index, 3).edge_index.tolist() == [[0, 0], [2, 2]]
    out = graph_attention(query, key, value, edge_index, backend=backend)
    torch.testing.assert_close(out[2], value[0])
    edge_index[1, 1] = 5
    with pytest.raises(IndexError, match="from 2 to 5"):
        graph_attention(query, key, value, edge_index, backend=backend)


def test_a_change_through_a_view_is_noticed():
    edge_index = torch.tensor([[0, 1], [2, 2]])
    Graph.of(edge_index, 3)
    edge_index[0].zero_()
    assert Graph.of(edge_index, 3).edge_index.tolist() == [[0, 0], [2, 2]]


def graphs_alive():
    import graphattn.graph

    return len(graphattn.graph._cache)


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
@pytest.mark.parametrize(
    "make",
    [
        SHUFFLED.clone,
        SHUFFLED.int,
        lambda: edge_index_of("col"),
        lambda: edge_index_of("row"),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_csc(),
    ],
    ids=["int64", "int32", "EdgeIndex col", "EdgeIndex row", "coo", "csr", "csc"],
)
def test_the_memory_ends_with_the_tensor(make):
    before = graphs_alive()
    edge_index = make()
    graph = Graph.of(edge_index, 4)
    assert Graph.of(edge_index, 4) is graph
    assert graphs_alive() == before + 1
    freed = weakref.ref(graph)
    tensor_freed = weakref.ref(edge_index)
    del graph, edge_index
    assert graphs_alive() == before
    assert freed() is None
    assert tensor_freed() is None


def test_an_id_used_again_does_not_bring_back_the_old_graph():
    import graphattn.graph

    ids = set()
    for first in range(200):  # CPython soon gives the same address again
        edge_index = torch.tensor([[first % 7], [0]])
        assert Graph.of(edge_index, 8).src_index.tolist() == [first % 7]
        ids.add(id(edge_index))
    assert len(ids) < 200
    # an entry that has outlived its tensor is not believed either
    old, new = torch.tensor([[1], [0]]), torch.tensor([[2], [0]])
    Graph.of(old, 8)
    graphattn.graph._cache[id(new)] = graphattn.graph._cache[id(old)]
    assert Graph.of(new, 8).src_index.tolist() == [2]
    del old
    assert Graph.of(new, 8) is Graph.of(new, 8)


def test_inference_tensors_work_and_are_not_remembered():
    before = graphs_alive()
    with torch.inference_mode():
        edge_index = SHUFFLED.clone()
        assert edge_index.is_inference()
        first = Graph.of(edge_index, 4)
        assert torch.equal(first.edge_index, SHUFFLED)
        edge_index[0, 0] = 0
        assert Graph.of(edge_index, 4).edge_index[0, 0] == 0
        # a normal tensor is remembered there as elsewhere
        assert Graph.of(SHUFFLED, 4) is Graph.of(SHUFFLED, 4)
    assert torch.equal(Graph.of(edge_index, 4).edge_index, edge_index)
    assert graphs_alive() <= before + 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: SHUFFLED.clone(),
        lambda: SHUFFLED[:, SHUFFLED[1].argsort()],
        lambda: edge_index_of("col"),
        lambda: edge_index_of("row").fill_cache_(),
        lambda: Graph(SHUFFLED, 4),
        lambda: Graph(SHUFFLED, 4).reverse(),
        lambda: Graph(SHUFFLED, 4).to("meta"),
    ],
    ids=["tensor", "sorted", "EdgeIndex col", "EdgeIndex row", "Graph", "reversed", "moved"],
)
@pytest.mark.parametrize("made_inside", [False, True])
def test_a_graph_used_in_inference_mode_first_trains_later(make, made_inside, backend):
    outside = None if made_inside else make()
    with torch.inference_mode():
        graph = Graph.of(make() if made_inside else outside, 4)
        if graph.device.type == "cpu":
            graph_attention(*features(4), graph, backend=backend)
        _ = graph.edge_index, graph.src_ptr, graph.target
    for name, array in vars(graph).items():
        if isinstance(array, torch.Tensor):
            assert not array.is_inference(), name
    assert not any(array.is_inference() for array in graph._by_source)
    if graph.device.type == "cpu":
        query = torch.randn(4, 2, 4, requires_grad=True)
        graph_attention(query, query, query, graph, backend=backend).sum().backward()
        assert query.grad.isfinite().all()


# Any graph ########################################################################################


@st.composite
def any_graph(draw):
    num_src, num_dst = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    edge = st.tuples(st.integers(0, max(num_src - 1, 0)), st.integers(0, max(num_dst - 1, 0)))
    edges = draw(st.lists(edge, max_size=15)) if num_src and num_dst else []
    edge_index = torch.tensor(edges, dtype=torch.int64).view(-1, 2).t()
    return edge_index, (num_src, num_dst)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(any_graph())
def test_any_graph_gives_back_its_edges_whatever_is_done_to_it(edges_and_size):
    edge_index, size = edges_and_size
    graph = Graph(edge_index, size)
    assert torch.equal(graph.edge_index, edge_index)
    assert torch.equal(graph.reverse().edge_index, edge_index.flip(0))
    assert torch.equal(graph.reverse().reverse().edge_index, edge_index)
    twice = Graph.batch([graph, graph])
    assert torch.equal(twice.edge_index[:, : graph.num_edges], edge_index)
    assert torch.equal(
        twice.edge_index[:, graph.num_edges :], edge_index + torch.tensor(size)[:, None]
    )
    order = torch.randperm(graph.num_edges)
    shuffled = Graph(edge_index[:, order], size)
    assert torch.equal(shuffled.dst_ptr, graph.dst_ptr)
    assert torch.equal(shuffled.src_ptr, graph.src_ptr)
    sparse = torch.sparse_coo_tensor(
        edge_index.flip(0), torch.ones(graph.num_edges), size[::-1], check_invariants=True
    )
    assert torch.equal(Graph.from_sparse(sparse).edge_index, edge_index)
