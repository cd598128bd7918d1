"""Layers: attention on graphs behind the interfaces of PyG and PyTorch."""

from graphattn.nn.attention import GraphAttentionConv, GraphMultiheadAttention
from graphattn.nn.block import GraphTransformerLayer

__all__ = ["GraphAttentionConv", "GraphMultiheadAttention", "GraphTransformerLayer"]
