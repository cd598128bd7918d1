"""Which backend there is, what it supports, and every reason why not.

Adding one: write its module, name it in ``NAMES`` with a line in :func:`missing` and
:func:`unsupported`, call it from :mod:`graphattn.functional`, and the tests of the contract run on
it.
"""

from __future__ import annotations

import importlib

import torch

from graphattn import _native

__all__ = ["NAMES", "check_name", "choose", "missing", "unsupported"]

NAMES = ("eager", "scatter", "cpu")


def missing(backend: str) -> str | None:
    """Why ``backend`` cannot be used in this installation at all; ``None`` when it can."""
    if backend == "scatter":
        try:
            importlib.import_module("torch_scatter")
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "torch_scatter":
                return (
                    "torch_scatter is not installed: pip install --no-build-isolation torch-scatter"
                )
            return f"torch_scatter cannot be imported: {error}"
        except OSError as error:  # built for another torch
            return f"torch_scatter does not match this torch: {error}"
    if backend == "cpu":
        return _native.missing()
    return None


def unsupported(backend: str, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Every reason why ``backend`` cannot run a call; empty when it can."""
    reason = missing(backend)
    if reason is not None:
        return [reason]
    if backend == "cpu":
        reasons = []
        if device.type != "cpu":
            reasons.append(f"the tensors are on {device.type!r}")
        if dtype not in _native.DTYPES:
            reasons.append(f"{dtype} is not supported")
        return reasons
    if backend == "scatter" and device.type not in ("cpu", "cuda"):
        return [f"torch_scatter has no kernels for device {device.type!r}"]
    return []


def check_name(backend: str, *, function: str) -> None:
    """Raises ``ValueError`` unless ``backend`` is ``"auto"`` or the name of a backend."""
    if backend not in ("auto", *NAMES):
        known = ", ".join(repr(name) for name in ("auto", *NAMES))
        raise ValueError(f"{function}: unknown backend {backend!r}. Use one of {known}.")


def choose(backend: str, device: torch.device, dtype: torch.dtype, *, function: str) -> str:
    """The backend that runs a call: ``"auto"`` may choose, any other name runs or raises.

    Raises:
        ValueError: The name is unknown, or the backend cannot run this call; with every reason.
    """
    check_name(backend, function=function)
    if backend == "auto":
        return "eager" if unsupported("cpu", device, dtype) else "cpu"
    reasons = unsupported(backend, device, dtype)
    if reasons:
        raise ValueError(
            f"{function}: backend={backend!r} cannot run this call: {'; '.join(reasons)}. Use "
            "backend='eager' or 'auto'."
        )
    return backend
