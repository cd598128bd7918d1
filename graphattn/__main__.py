"""``python -m graphattn``: what a bug report needs to say about an installation."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

import graphattn
from graphattn import backends

_PACKAGES = (
    "torch",
    "torch-geometric",
    "torch-scatter",
    "triton",
    "ogb",
    "networkx",
    "numpy",
    "scipy",
)


def main() -> None:
    """Prints versions, devices, threads, and each backend with the reason where it is missing."""
    rows = [
        ("graphattn", graphattn.__version__),
        *((package, _version(package)) for package in _PACKAGES),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        (
            "CPU",
            f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used",
        ),
        *_accelerators(),
    ]
    for name in backends.NAMES:
        reason = backends.missing(name)
        rows.append((f"backend {name}", "available" if reason is None else f"missing: {reason}"))
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    chosen = [
        f"{backends.choose('auto', torch.device(device), torch.float32, function='graphattn')} on "
        f"{device.upper()}"
        for device in devices
    ]
    rows.append(("backend auto", f"takes {', '.join(chosen)}"))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _accelerators() -> list[tuple[str, str]]:
    if torch.cuda.is_available():
        return [
            (f"GPU {index}", torch.cuda.get_device_name(index))
            for index in range(torch.cuda.device_count())
        ]
    built = torch.version.cuda or torch.version.hip
    reason = "no device is visible" if built else "this torch is built for CPU only"
    return [("GPU", f"none: {reason}")]


if __name__ == "__main__":
    main()
