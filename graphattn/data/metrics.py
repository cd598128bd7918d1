"""The two metrics of node classification: accuracy and the area under the ROC curve."""

import numpy as np
from torch import Tensor

from graphattn.data.archive import METRICS, Array


def evaluate(metric: str, prediction: Tensor, target: Tensor) -> float:
    r"""Compute the accuracy or the area under the ROC curve, a number between 0 and 1.

    The accuracy is the share of nodes whose predicted class is the label. The area under the ROC
    curve is the chance that a positive node scores above a negative one, ties counting one half;
    with midranks `r`, P positives and Q negatives it is `(sum of the positives' r - P (P + 1) / 2)
    / (P Q)`. Over several tasks it is the mean. Both equal `ogb.nodeproppred.Evaluator`, which
    wants `[N, 1]` and classes.

    Args:
        metric: `"accuracy"` or `"rocauc"`, as in `data.metric`.
        prediction: For accuracy, logits or probabilities, floating `[N, C]` with C >= 2, or
            classes, integer `[N]` or `[N, 1]`. For rocauc, scores `[N]` or `[N, T]`; for one task
            also `[N, 2]`, the logits of both classes, of which the difference is the score. Any
            device.
        target: For accuracy, classes, integer `[N]` or `[N, 1]`. For rocauc, 0 or 1 in `[N]` or
            `[N, T]`, where NaN marks a node without label in that task.

    Returns:
        The metric as a Python float.

    Raises:
        ValueError: If the metric is unknown, shapes do not fit, there is no node, a prediction is
            NaN, or (rocauc) a task has no positive or no negative node, so that its area is
            undefined.
        TypeError: If classes are not integers.

    Example:
        >>> import torch
        >>> evaluate("accuracy", torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0]))
        0.5
        >>> evaluate("rocauc", torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        0.75
    """
    if metric not in METRICS:
        raise ValueError(f"evaluate: metric must be 'accuracy' or 'rocauc', got {metric!r}.")
    if prediction.dim() == 0 or target.dim() == 0 or prediction.size(0) != target.size(0):
        raise ValueError(
            "evaluate: prediction and target must have one row per node each, got shapes "
            f"{tuple(prediction.shape)} and {tuple(target.shape)}."
        )
    if target.size(0) == 0:
        raise ValueError("evaluate: there is no node to evaluate (0 rows). Is the mask empty?")
    if prediction.is_floating_point():
        bad = int(prediction.isnan().sum())
        if bad > 0:
            raise ValueError(
                f"evaluate: prediction holds {bad} NaN values; the metric is undefined."
            )
    if metric == "accuracy":
        return _accuracy(prediction.detach(), target.detach())
    return _rocauc(prediction.detach(), target.detach())


def _accuracy(prediction: Tensor, target: Tensor) -> float:
    if target.dim() == 2 and target.size(1) == 1:
        target = target[:, 0]
    if target.dim() != 1:
        raise ValueError(
            f"evaluate: accuracy needs target of shape (num_nodes,), got {tuple(target.shape)}."
        )
    if target.is_floating_point():
        raise TypeError(f"evaluate: accuracy needs an integer target, got {target.dtype}.")
    if prediction.is_floating_point():
        if prediction.dim() != 2 or prediction.size(1) < 2:
            raise ValueError(
                "evaluate: accuracy needs logits of shape (num_nodes, num_classes) with "
                f"num_classes >= 2, or integer classes, got {prediction.dtype} of shape "
                f"{tuple(prediction.shape)}."
            )
        prediction = prediction.argmax(dim=-1)
    elif prediction.dim() == 2 and prediction.size(1) == 1:
        prediction = prediction[:, 0]
    if prediction.dim() != 1:
        raise ValueError(
            "evaluate: accuracy needs integer classes of shape (num_nodes,), got "
            f"{tuple(prediction.shape)}. Logits must be floating point."
        )
    return float((prediction == target.to(prediction.device)).double().mean())


def _rocauc(prediction: Tensor, target: Tensor) -> float:
    if target.dim() == 1:
        target = target[:, None]
    if prediction.dim() == 1:
        prediction = prediction[:, None]
    scores, labels = prediction.double().cpu().numpy(), target.double().cpu().numpy()
    if labels.shape[1:] == (1,) and scores.shape[1:] == (2,):
        scores = scores[:, 1:] - scores[:, :1]
    if scores.shape != labels.shape or labels.ndim != 2 or labels.shape[1] == 0:
        raise ValueError(
            "evaluate: rocauc needs one score per node and task, got prediction of shape "
            f"{tuple(prediction.shape)} and target of shape {tuple(target.shape)}."
        )
    known = ~np.isnan(labels)
    if not np.isin(labels[known], (0.0, 1.0)).all():
        raise ValueError("evaluate: rocauc needs a target of 0, 1 or NaN (no label).")
    positives = (labels == 1).sum(axis=0)
    undefined = np.flatnonzero((positives == 0) | (positives == known.sum(axis=0)))
    if undefined.size > 0:
        raise ValueError(
            f"evaluate: rocauc is undefined for {undefined.size} of {labels.shape[1]} tasks, which "
            "have no positive or no negative node: "
            f"{', '.join(map(str, undefined[:10]))}{' and more' if undefined.size > 10 else ''}."
        )
    areas = [_area(scores[known[:, t], t], labels[known[:, t], t]) for t in range(labels.shape[1])]
    return float(np.mean(areas))


def _area(scores: Array, labels: Array) -> float:
    from scipy.stats import rankdata

    positive = labels == 1
    p = int(positive.sum())
    ranks = rankdata(scores)
    return float((ranks[positive].sum() - p * (p + 1) / 2) / (p * (labels.size - p)))
