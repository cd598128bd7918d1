"""Attention on graphs in PyTorch: exact multi-head attention along edges, and only there."""

from graphattn._native import keep_pages
from graphattn.functional import attention_weights, edge_softmax, graph_attention
from graphattn.graph import Graph
from graphattn.reference import dense_attention

__version__ = "0.1.0"

__all__ = [
    "Graph",
    "attention_weights",
    "dense_attention",
    "edge_softmax",
    "graph_attention",
    "keep_pages",
]
