"""Models for whole tasks, as thin stacks of the layers."""

from graphattn.models.graph_transformer import GraphTransformer, mask_labels

__all__ = ["GraphTransformer", "mask_labels"]
