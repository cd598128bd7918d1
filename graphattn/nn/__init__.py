"""Layers: attention on graphs behind the interfaces of PyG and PyTorch."""

from graphattn.nn.attention import GraphAttentionConv, GraphMultiheadAttention, KeyValueCache
from graphattn.nn.block import GraphTransformerDecoderLayer, GraphTransformerLayer
from graphattn.nn.convolution import ConvolutionModule
from graphattn.nn.diffusion import AttentionDiffusion
from graphattn.nn.encoding import (
    AlibiBias,
    LaplacianEncoding,
    LearnedEncoding,
    RelativeBias,
    RotaryEncoding,
    ShortestPathBias,
    SinusoidalEncoding,
)
from graphattn.nn.global_attention import (
    GlobalAttention,
    LinformerAttention,
    PerformerAttention,
    ReformerAttention,
)
from graphattn.nn.gps import ConformerLayer, GPSLayer, GraphSelfAttention, PolynormerLayer
from graphattn.nn.linear_cost import linear_attention

__all__ = [
    "AlibiBias",
    "AttentionDiffusion",
    "ConformerLayer",
    "ConvolutionModule",
    "GPSLayer",
    "GlobalAttention",
    "GraphAttentionConv",
    "GraphMultiheadAttention",
    "GraphSelfAttention",
    "GraphTransformerDecoderLayer",
    "GraphTransformerLayer",
    "KeyValueCache",
    "LaplacianEncoding",
    "LearnedEncoding",
    "LinformerAttention",
    "PerformerAttention",
    "PolynormerLayer",
    "ReformerAttention",
    "RelativeBias",
    "RotaryEncoding",
    "ShortestPathBias",
    "SinusoidalEncoding",
    "linear_attention",
]
