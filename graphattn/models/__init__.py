"""Models for whole tasks, as thin stacks of the layers."""

from graphattn.models.graph_transformer import GraphTransformer, mask_labels
from graphattn.models.transformer import Generation, Transformer
from graphattn.models.vision_transformer import VisionTransformer

__all__ = ["Generation", "GraphTransformer", "Transformer", "VisionTransformer", "mask_labels"]
