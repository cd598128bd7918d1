"""A random graph with the size, the degree skew and the time split of ogbn-arxiv."""

import math

import numpy as np
from torch_geometric.data import Data

from graphattn.data.archive import Array, assemble

NUM_CLASSES = 40
NUM_FEATURES = 128
ARXIV_NODES, ARXIV_EDGES = 169_343, 1_166_243
ARXIV_TRAIN, ARXIV_VALID = 90_941, 29_799

# Chosen so that the figures in `synthetic_arxiv` come out.
SAME_CLASS = 0.42  # chance that a citation is looked for within the class
SIGNAL = 0.185  # standard deviation of the class means, in units of the noise
OUT_SPREAD = 1.1  # log-normal spread of the number of citations made
IN_OFFSET = 8.0  # citations received ~ 1 / (rank + offset)
LOOK_AHEAD = 0.1  # chance to keep a citation of a later paper
AGE_NOISE = 0.7  # how loosely the rank follows the age


def synthetic_arxiv(*, num_nodes: int = ARXIV_NODES, seed: int = 0) -> Data:
    """Generate a stand-in of ogbn-arxiv: a degree-corrected block model with noisy features.

    Nodes have a class (40, of unequal size), a date, a log-normal rate of citing and a power-law
    rate of being cited, larger for old nodes. A citation goes with probability 0.42 to the class of
    the citing node, else anywhere, and almost always back in time. Features are the mean of the
    class plus noise. At full size an MLP on the features reaches about 52 % of the test nodes, a
    linear model that also sees the mean over the neighbours 69 %, over two hops 74 %: what
    attention over edges has to find is there.

    Args:
        num_nodes: N, at least 100. Edges scale with it: 1,166,243 at full size.
        seed: Seed of every random draw. The same numpy gives the same graph.

    Returns:
        What `load("ogbn-arxiv")` returns, with `name="synthetic-arxiv"` (or, for
        another size, `"synthetic-arxiv-N"`): 40 classes, `x` `[N,
        128]`, directed edges without duplicates or self-loops, symmetric degree with median 6 and
        maximum about 13,000 at full size, and a split by `node_year` (to 2017, 2018, from 2019)
        with OGB's shares.

    Raises:
        ValueError: If `num_nodes` is less than 100 or `seed` is negative.

    Example:
        >>> data = synthetic_arxiv(num_nodes=500)
        >>> data.num_edges, data.x.shape
        (3443, torch.Size([500, 128]))
    """
    if num_nodes < 100:
        raise ValueError(f"synthetic_arxiv: num_nodes must be at least 100, got {num_nodes}.")
    if seed < 0:
        raise ValueError(f"synthetic_arxiv: seed must not be negative, got {seed}.")
    rng = np.random.Generator(np.random.PCG64(seed))
    share = 1.0 / np.arange(2, NUM_CLASSES + 2)
    sizes = np.maximum((share / share.sum() * num_nodes).astype(np.int64), 1)
    sizes[0] += num_nodes - sizes.sum()
    label = np.repeat(
        np.arange(NUM_CLASSES), sizes
    )  # sorted, so that a class is one range of nodes
    date = rng.random(num_nodes)
    source, target = _citations(rng, label, sizes, date)

    means = rng.standard_normal((NUM_CLASSES, NUM_FEATURES), dtype=np.float32) * np.float32(SIGNAL)
    x = means[label]
    x += rng.standard_normal(x.shape, dtype=np.float32)
    year, splits = _time_split(date)

    shuffle = rng.permutation(num_nodes)  # position of each node in the result
    inverse = np.argsort(shuffle)
    return assemble(
        "synthetic-arxiv" if num_nodes == ARXIV_NODES else f"synthetic-arxiv-{num_nodes}",
        "synthetic_arxiv",
        edge_index=np.stack([shuffle[source], shuffle[target]]).astype(np.int64),
        num_nodes=num_nodes,
        x=x[inverse],
        y=label[inverse],
        splits={key: mask[inverse] for key, mask in splits.items()},
        metric="accuracy",
        num_classes=NUM_CLASSES,
        extras={"node_year": year[inverse]},
    )


def _citations(
    rng: np.random.Generator, label: Array, sizes: Array, date: Array
) -> tuple[Array, Array]:
    """Draw distinct directed edges, each as (citing, cited)."""
    num_nodes = label.size
    num_edges = round(num_nodes * ARXIV_EDGES / ARXIV_NODES)
    rank = np.empty(num_nodes)
    rank[np.argsort(date + AGE_NOISE * rng.random(num_nodes), kind="stable")] = np.arange(num_nodes)
    citing = np.cumsum(np.exp(OUT_SPREAD * rng.standard_normal(num_nodes)))
    cited = np.concatenate([[0.0], np.cumsum(1.0 / (rank + IN_OFFSET))])
    bounds = np.concatenate([[0], np.cumsum(sizes)])

    codes = np.empty(0, dtype=np.int64)  # source * N + target
    while codes.size < num_edges:
        draws = math.ceil(1.4 * (num_edges - codes.size)) + 64
        source = np.searchsorted(citing, rng.random(draws) * citing[-1], side="right")
        within = rng.random(draws) < SAME_CLASS
        low = np.where(within, cited[bounds[label[source]]], 0.0)
        high = np.where(within, cited[bounds[label[source] + 1]], cited[-1])
        target = np.searchsorted(cited, low + rng.random(draws) * (high - low), side="right") - 1
        target = np.minimum(target, num_nodes - 1)
        keep = (source != target) & (
            (date[source] > date[target]) | (rng.random(draws) < LOOK_AHEAD)
        )
        codes = np.unique(np.concatenate([codes, source[keep] * num_nodes + target[keep]]))
    codes = rng.permutation(codes)[:num_edges]
    return codes // num_nodes, codes % num_nodes


def _time_split(date: Array) -> tuple[Array, dict[str, Array]]:
    """Turn dates into years and the split by year, with OGB's shares of nodes."""
    num_nodes = date.size
    order = np.argsort(date, kind="stable")
    num_train = round(num_nodes * ARXIV_TRAIN / ARXIV_NODES)
    num_valid = round(num_nodes * ARXIV_VALID / ARXIV_NODES)
    position = np.empty(num_nodes, dtype=np.int64)
    position[order] = np.arange(num_nodes)
    # The number of papers doubles about every three years until 2017; then 2018, 2019 and 2020.
    age = np.floor(-3.0 * np.log2((position + 0.5) / num_train))
    year = np.where(position < num_train, np.maximum(2017 - age, 1971), 2018).astype(np.int64)
    later = position - num_train - num_valid
    year[later >= 0] = 2019
    year[later >= 0.8 * (num_nodes - num_train - num_valid)] = 2020
    splits = {"train": year <= 2017, "val": year == 2018, "test": year >= 2019}
    return year, splits
