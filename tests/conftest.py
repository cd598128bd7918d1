"""What every test starts from, and the backends that all of them run on."""

import os
import socket

# The kernels for GPU run in Triton's interpreter. It is read when they are imported.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from graphattn import backends
from operands import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request):
    reason = backends.missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture
def poisoned_memory():
    """Uninitialised memory is filled with NaN, that of extensions too."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # quickest for small tensors; a test that needs more says so


@pytest.fixture(autouse=True)
def _local_only(monkeypatch):
    """No proxy of the machine, and no connection but to the machine itself."""
    for variable in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    connect = socket.socket.connect

    def guarded(self, address):
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "localhost"):
            raise AssertionError(f"connection to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
