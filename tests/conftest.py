"""What every test starts from, and the backends that all of them run on."""

import pytest
import torch

from graphattn import backends


@pytest.fixture(params=backends.NAMES)
def backend(request):
    reason = backends.missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # quickest for small tensors; a test that needs more says so
