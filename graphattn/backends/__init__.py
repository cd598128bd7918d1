"""Which backend there is, what it supports, and every reason why not.

Adding one: write its module, name it in ``NAMES`` with a line in :func:`missing` and
:func:`unsupported`, call it from :mod:`graphattn.functional`, and the tests of the contract run on
it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os

import torch

from graphattn import _native

__all__ = ["FUSED", "NAMES", "check_name", "choose", "missing", "unsupported"]

NAMES = ("eager", "scatter", "cpu", "triton")
FUSED = ("cpu", "triton")

# Triton reads it when its kernels are made; then they run on CPU tensors, slowly, to be tested.
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
_OLDEST_TRITON = (3, 6)
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_CHANNELS = 256
_OLDEST_CAPABILITY = (8, 0)  # of an NVIDIA GPU, for Triton


def _no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; on Linux the GPU builds of torch bring it with them"
    for distribution in ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_TRITON:
            oldest = ".".join(map(str, _OLDEST_TRITON))
            return f"{distribution} {version} is too old: {oldest} or newer is needed"
    return None


_triton_reason = _no_triton()


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
    if backend == "triton":
        if _triton_reason is None and not _INTERPRETED and not torch.cuda.is_available():
            return (
                "no GPU is visible to torch. To try the kernels on CPU, set TRITON_INTERPRET=1 "
                "before graphattn is imported"
            )
        return _triton_reason
    return None


def unsupported(
    backend: str, device: torch.device, dtype: torch.dtype, dims: dict[str, int] | None = None
) -> list[str]:
    """Every reason why ``backend`` cannot run a call; empty when it can.

    Args:
        backend: One of ``NAMES``.
        device: That of the tensors.
        dtype: That of the query.
        dims: Channels of the call by name: ``head_dim``, ``value_dim``, ``edge_dim``.
    """
    # Tensors on a GPU say that there is one, which a compiler could not ask.
    on_gpu = backend == "triton" and device.type == "cuda"
    reason = _triton_reason if on_gpu else missing(backend)
    if reason is not None:
        return [reason]
    if backend == "cpu":
        reasons = [] if device.type == "cpu" else [f"the tensors are on {device.type!r}"]
        return reasons + ([] if dtype in _native.DTYPES else [f"{dtype} is not supported"])
    if backend == "triton":
        fits = device.type == ("cpu" if _INTERPRETED else "cuda")
        reasons = [] if fits else [f"the tensors are on {device.type!r}"]
        # A tensor on a GPU means that CUDA has started.
        if on_gpu and not torch.compiler.is_compiling() and torch.cuda.is_initialized():
            capability = torch.cuda.get_device_capability(device)
            if torch.version.hip is None and capability < _OLDEST_CAPABILITY:
                has, wanted = (".".join(map(str, x)) for x in (capability, _OLDEST_CAPABILITY))
                reasons.append(f"the GPU has compute capability {has}, and Triton needs {wanted}")
        if dtype not in _TRITON_DTYPES:
            reasons.append(f"{dtype} is not supported")
        for name, dim in (dims or {}).items():
            if dim > _MOST_CHANNELS:
                reasons.append(f"{name} {dim} exceeds {_MOST_CHANNELS}")
        return reasons
    if backend == "scatter" and device.type not in ("cpu", "cuda"):
        return [f"torch_scatter has no kernels for device {device.type!r}"]
    return []


def check_name(backend: str, *, function: str) -> None:
    """Raises ``ValueError`` unless ``backend`` is ``"auto"`` or the name of a backend."""
    if backend not in ("auto", *NAMES):
        known = ", ".join(repr(name) for name in ("auto", *NAMES))
        raise ValueError(f"{function}: unknown backend {backend!r}. Use one of {known}.")


def choose(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    dims: dict[str, int] | None = None,
    *,
    function: str,
) -> str:
    """The backend that runs a call: ``"auto"`` may choose, any other name runs or raises.

    Args:
        backend: ``"auto"`` or one of ``NAMES``.
        device: As in :func:`unsupported`, as are the next two.
        dtype: That of the query.
        dims: Channels of the call by name.
        function: Who asks, for the error.

    Raises:
        ValueError: The name is unknown, or the backend cannot run this call; with every reason.
    """
    check_name(backend, function=function)
    if backend == "auto":
        fused = "triton" if device.type == "cuda" else "cpu"
        return "eager" if unsupported(fused, device, dtype, dims) else fused
    reasons = unsupported(backend, device, dtype, dims)
    if reasons:
        raise ValueError(
            f"{function}: backend={backend!r} cannot run this call: {'; '.join(reasons)}. Use "
            "backend='eager' or 'auto'."
        )
    return backend
