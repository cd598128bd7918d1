"""ConvolutionModule: a convolution for each sequence alone, made by one for all of them."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn.nn.convolution import ConvolutionModule
from graphattn.patterns import batch_vector
from parity import TOLERANCE, assert_equal_to, leaf

# An empty sequence among them, one shorter than half a kernel, one longer than a kernel.
LENGTHS = {"one": [7], "several": [3, 1, 0, 12, 2], "many of one": [1] * 9, "one row": [1]}


def by_hand(module: ConvolutionModule, x: Tensor, lengths: list[int]) -> Tensor:
    """Each sequence for itself, from the parameters."""
    weights = dict(module.named_parameters())
    outputs = []
    for sequence in x.split(lengths):
        if sequence.size(0) == 0:
            continue
        y = F.linear(sequence, weights["pointwise1.weight"], weights["pointwise1.bias"])
        value, gate = y.chunk(2, dim=-1)
        y = F.conv1d(
            (value * gate.sigmoid()).t()[None],
            weights["depthwise.weight"],
            weights["depthwise.bias"],
            padding=module.kernel_size // 2,
            groups=module.channels,
        )[0].t()
        y = F.layer_norm(y, (module.channels,), weights["norm.weight"], weights["norm.bias"])
        y = y * y.sigmoid()
        outputs.append(F.linear(y, weights["pointwise2.weight"], weights["pointwise2.bias"]))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kernel_size", [1, 3, 9])
@pytest.mark.parametrize("name", list(LENGTHS))
def test_equals_conv1d_on_each_sequence(
    name: str, kernel_size: int, dtype: torch.dtype, poisoned_memory: None
) -> None:
    lengths = LENGTHS[name]
    module = ConvolutionModule(6, kernel_size).to(dtype)
    x = leaf(sum(lengths), 6, dtype=dtype)
    out, expected = module(x, batch_vector(lengths)), by_hand(module, x, lengths)
    assert_equal_to(out, expected)
    weight = torch.randn_like(out)
    leaves = [x, *module.parameters()]
    found = torch.autograd.grad(out, leaves, weight)
    for actual, gradient in zip(found, torch.autograd.grad(expected, leaves, weight), strict=True):
        assert_equal_to(actual, gradient)


def test_gradients_by_finite_differences() -> None:
    module = ConvolutionModule(3, 3).double()
    assert torch.autograd.gradcheck(lambda x: module(x, batch_vector([2, 3])), leaf(5, 3))


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_c75_no_sequence_feels_another(norm: str) -> None:
    module = ConvolutionModule(4, 5, norm=norm).eval()
    x, batch = torch.randn(8, 4), batch_vector([3, 5])
    out = module(x, batch)
    x[3:] = float("nan")
    assert torch.equal(module(x, batch)[:3], out[:3])
    torch.testing.assert_close(module(x[:3], batch[:3]), out[:3])


def test_which_numbers_batch_has_does_not_matter() -> None:
    module, x = ConvolutionModule(4, 5), torch.randn(5, 4)
    out = module(x, torch.tensor([0, 0, 1, 1, 1]))
    assert torch.equal(module(x, torch.tensor([3, 3, 70, 70, 70])), out)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_c51_every_parameter_gets_a_gradient(norm: str) -> None:
    module = ConvolutionModule(4, 3, norm=norm)
    out = module(torch.randn(6, 4), batch_vector([4, 2]))
    (out * torch.randn_like(out)).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        if (norm, name) != ("batch", "depthwise.bias"):  # the mean is taken away again
            assert parameter.grad.abs().max() > 0.0, name


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_c20_no_rows(norm: str) -> None:
    module, x = ConvolutionModule(4, 5, norm=norm), torch.randn(0, 4, requires_grad=True)
    out = module(x, batch_vector([]))
    assert out.shape == (0, 4)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_batch_norm_is_over_all_rows() -> None:
    module = ConvolutionModule(4, 3, norm="batch").double()
    plain = ConvolutionModule(4, 3).double()
    plain.norm = nn.Identity()
    plain.load_state_dict(module.state_dict(), strict=False)
    seen: list[Tensor] = []
    plain.norm.register_forward_hook(lambda norm, inputs, output: seen.append(output))
    x, batch = torch.randn(9, 4).double(), batch_vector([4, 5])
    module(x, batch)
    plain(x, batch)
    torch.testing.assert_close(module.norm.module.running_mean, 0.1 * seen[0].mean(0))


def test_c45_dropout_in_training_only() -> None:
    module, x = ConvolutionModule(64, 3, dropout=0.5), torch.randn(100, 64)
    batch = batch_vector([60, 40])
    dropped = (module(x, batch) == 0.0).double().mean()
    assert 0.45 < dropped < 0.55
    module.eval()
    assert torch.equal(module(x, batch), module(x, batch))
    assert (module(x, batch) != 0.0).all()


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_reset_and_copy(norm: str) -> None:
    module, x, batch = ConvolutionModule(8, 3, norm=norm).eval(), torch.randn(5, 8), batch_vector(5)
    out = module(x, batch)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x, batch), out)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(7.0)
    twin.reset_parameters()
    for name, parameter in twin.named_parameters():
        assert not (parameter == 7.0).any(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c07_autocast_and_pure_low_precision(dtype: torch.dtype) -> None:
    module, x, batch = ConvolutionModule(8, 5), torch.randn(7, 8), batch_vector([4, 3])
    expected = module(x, batch)
    with torch.autocast("cpu", dtype):
        out = module(x, batch)
    out.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())
    low = module.to(dtype)(x.to(dtype), batch)
    assert low.dtype == dtype
    for actual in (out, low):
        torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_c56_compiles_without_a_break_for_changing_lengths() -> None:
    traced = []

    def count(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> object:
        traced.append(graph)
        return graph.forward

    torch._dynamo.reset()
    module = ConvolutionModule(4, 5)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=count)
    for lengths in ([3, 4], [5, 1, 2], [9], []):
        x, batch = torch.randn(sum(lengths), 4), batch_vector(lengths)
        torch.testing.assert_close(compiled(x, batch), module(x, batch))
    torch._dynamo.reset()
    assert len(traced) <= 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kernel_size": 4}, "an odd kernel_size, so that a row is in the middle of what it sees"),
        ({"kernel_size": -1}, "got channels=4, kernel_size=-1."),
        ({"channels": 0}, "got channels=0, kernel_size=31."),
        (
            {"norm": "group"},
            "ConvolutionModule: norm must be one of 'layer', 'batch', got 'group'.",
        ),
    ],
    ids=str,
)
def test_constructor_refuses(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        ConvolutionModule(**({"channels": 4} | options))


def test_c38_batches_that_do_not_fit_are_named() -> None:
    module, x = ConvolutionModule(4, 3), torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"batch must be sorted.*Sort x and batch by"):
        module(x, torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ValueError, match=r"one number for each of the 4 rows, got shape \(2,\)"):
        module(x, torch.tensor([2, 2]))
    with pytest.raises(ValueError, match=r"x must have shape \(num_rows, 4\), got \(1, 4, 4\)"):
        module(x[None], torch.zeros(4))
