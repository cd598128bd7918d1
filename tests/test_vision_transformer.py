"""VisionTransformer against a dense one, and what its patterns and positions mean."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from graphattn.models.vision_transformer import VisionTransformer
from graphattn.patterns import complete, grid, to_mask
from parity import assert_equal_to

POSITIONS = ("learned", "sinusoidal", "relative", None)
WINDOW = partial(grid, window=3)


def make(*, image_size: int | tuple[int, int] = (6, 8), **options: object) -> VisionTransformer:
    """A small model for images of 2 channels, its parameters moved from where they start."""
    options = {"patch_size": 2, "in_channels": 2, "num_layers": 2, "heads": 2} | options
    model = VisionTransformer(image_size, hidden_channels=8, out_channels=3, **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def images(batch: int = 3, height: int = 6, width: int = 8) -> Tensor:
    return torch.randn(batch, 2, height, width, dtype=torch.float64)


def dense(model: VisionTransformer, pixels: Tensor, blocked: Tensor | None = None) -> Tensor:
    """The same model of torch's modules, patches cut out by hand, the class token first."""
    size, embedding = model.patch_size, model.patch_embedding
    rows, columns = pixels.size(2) // size, pixels.size(3) // size
    patches = [
        pixels[:, :, r * size : (r + 1) * size, c * size : (c + 1) * size].flatten(1)
        for r, c in product(range(rows), range(columns))
    ]
    x = torch.stack(patches, dim=1) @ embedding.weight.flatten(1).t() + embedding.bias
    if model.encoding is not None:
        place = torch.tensor(list(product(range(rows), range(columns))))
        x = x + model.encoding(torch.arange(len(patches)) if model.position == "learned" else place)
    if model.class_token is not None:
        x = torch.cat([model.class_token.expand(x.size(0), 1, -1), x], dim=1)
    for layer in model.layers:
        theirs = nn.TransformerEncoderLayer(
            8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True
        ).double()
        theirs.load_state_dict(layer.state_dict())
        x = theirs(x, src_mask=blocked)
    x = model.norm(x)
    return model.head(x.mean(dim=1) if model.class_token is None else x[:, 0])


@pytest.mark.parametrize("pool", ["class", "mean"])
@pytest.mark.parametrize("position", ["learned", "sinusoidal", None])
@pytest.mark.parametrize("patch_size", [1, 2])
def test_equals_a_dense_vision_transformer(
    patch_size: int, position: str | None, pool: str
) -> None:
    model, pixels = make(patch_size=patch_size, position=position, pool=pool), images()
    assert_equal_to(model(pixels), dense(model, pixels))


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_a_window_is_a_mask_that_leaves_the_class_token_free(pool: str) -> None:
    model, pixels = make(pattern=WINDOW, pool=pool), images()
    blocked = ~to_mask(grid(3, 4, 3), 12)
    if pool == "class":
        blocked = nn.functional.pad(blocked, (1, 0, 1, 0), value=False)
    assert_equal_to(model(pixels), dense(model, pixels, blocked))
    assert not torch.allclose(model(pixels), dense(model, pixels))


def test_relative_position_is_a_bias_by_offset() -> None:
    model, pixels = make(position="relative"), images(1)
    assert model.encoding is None
    graph, among, place = model._graph(3, 4, torch.device("cpu"))
    bias = torch.zeros(13, 13, 2, dtype=torch.float64)
    src, dst = graph.edge_index
    bias[dst, src] = model._bias(among, place)
    for one, other in ((0, 1), (5, 9)):  # the same offset wherever it is
        step = place[one] - place[other]
        for a, b in product(range(12), range(12)):
            if torch.equal(place[a] - place[b], step):
                assert torch.equal(bias[a, b], bias[one, other])
    # Different for each direction, and the token's own three.
    assert len({tuple(row) for row in bias.flatten(0, 1).tolist()}) == 5 * 7 + 3
    model.layers = model.layers[:1]
    mask = bias.roll((1, 1), (0, 1)).permute(2, 0, 1)  # the token first
    assert_equal_to(model(pixels), dense(model, pixels, mask))


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("pattern", [None, WINDOW])
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_c51_every_parameter_gets_a_gradient(pool: str, pattern: object, position: str) -> None:
    model = make(pool=pool, pattern=pattern, position=position, dropout=0.1, attention_dropout=0.1)
    out = model(images())
    (out * torch.randn_like(out)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0.0, name


@pytest.mark.parametrize("position", POSITIONS)
def test_a_batch_equals_its_images(position: str | None) -> None:
    model, pixels = make(position=position), images(4)
    assert_equal_to(model(pixels), torch.cat([model(pixels[i : i + 1]) for i in range(4)]))
    pixels[1:] = float("nan")
    assert model(pixels)[0].isfinite().all()
    assert model(images(0)).shape == (0, 3)


def test_without_positions_patches_are_a_set() -> None:
    pixels = images()
    turned = pixels.view(3, 2, 3, 2, 4, 2).flip(2, 4).reshape(3, 2, 6, 8)  # patches change places
    for position in POSITIONS:
        model = make(position=position)
        same = torch.allclose(model(turned), model(pixels))
        assert same == (position is None)


@pytest.mark.parametrize("position", ["sinusoidal", "relative", None])
def test_other_image_sizes_than_in_training(position: str | None) -> None:
    model = make(position=position, pattern=WINDOW)
    for height, width in ((2, 2), (6, 8), (8, 6), (10, 20)):
        assert model(images(2, height, width)).shape == (2, 3)


def test_a_learned_position_has_no_larger_images() -> None:
    model = make(position="learned")
    places = []
    model.encoding.register_forward_pre_hook(lambda encoding, inputs: places.append(inputs[0]))
    model(images(2, 4, 6))
    assert places[0].tolist() == [0, 1, 2, 4, 5, 6]  # the upper left ones of 3 x 4
    for height, width in ((8, 8), (6, 10)):
        with pytest.raises(
            ValueError, match=r"learned for 3 x 4 patches, but images have \d x \d\. U"
        ):
            model(images(2, height, width))


def test_the_graph_of_a_size_is_made_once() -> None:
    calls = []

    def pattern(rows: int, columns: int) -> Tensor:
        calls.append((rows, columns))
        return complete(rows * columns)

    model = make(pattern=pattern, position=None)
    for height, width in ((6, 8), (6, 8), (4, 4), (6, 8)):
        model(images(2, height, width))
    assert calls == [(3, 4), (2, 2)]
    assert model.graph(6, 8) is model.graph(6, 8)
    for width in range(2, 30, 2):
        model(images(1, 2, width))
    assert len(model._graphs) <= 8


def test_c39_weights_belong_to_the_edges_of_the_graph() -> None:
    model, pixels = make(pattern=WINDOW), images()
    out, weights = model(pixels, return_attention_weights=True)
    assert torch.equal(out, model(pixels))
    graph = model.graph(6, 8)
    assert [tuple(of_layer.shape) for of_layer in weights] == [(3, graph.num_edges, 2)] * 2
    for of_layer in weights:
        sums = torch.zeros(3, 13, 2, dtype=torch.float64)
        sums.index_add_(1, graph.edge_index[1], of_layer)
        torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("position", POSITIONS)
def test_copy_pickle_state_and_reset(position: str | None) -> None:
    options = {"position": position, "pattern": WINDOW}
    model, pixels = make(**options), images()
    out = model(pixels)
    assert torch.equal(copy.deepcopy(model)(pixels), out)
    assert torch.equal(pickle.loads(pickle.dumps(model))(pixels), out)
    twin = make(**options)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(pixels), out)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(7.0)
    twin.reset_parameters()
    for name, parameter in twin.named_parameters():
        assert not (parameter == 7.0).any(), name


def test_c45_dropout_in_training_only() -> None:
    of_inputs, of_layers, of_weights = make(), make(dropout=0.5), make(attention_dropout=0.5)
    of_inputs.dropout.p, of_layers.dropout.p, pixels = 0.5, 0.0, images()
    for model in (of_inputs, of_layers, of_weights):
        assert not torch.equal(model(pixels), model(pixels))
        model.eval()
        assert torch.equal(model(pixels), model(pixels))


def test_c07_autocast_and_pure_low_precision() -> None:
    for position in POSITIONS:
        model, pixels = make(position=position).float(), images().float()
        expected = model(pixels)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(pixels)
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.1)
        out.float().sum().backward()
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
        low = model.bfloat16()(pixels.bfloat16())
        assert low.dtype == torch.bfloat16
        torch.testing.assert_close(low.float(), expected, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(("pool", "pattern"), [("class", WINDOW), ("mean", None)])
def test_every_option_trains(pool: str, pattern: object, position: str | None) -> None:
    model = VisionTransformer(
        4, 1, 2, 16, 3, 1, 2, pool=pool, pattern=pattern, position=position, feedforward=16
    )
    pixels, target = torch.randn(6, 2, 4, 4), torch.arange(6) % 3
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(pixels), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_c56_compiles_without_a_break_for_changing_batches() -> None:
    traced = []

    def count(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> object:
        traced.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = make(position="relative", num_layers=1)
    model.graph(6, 8)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for batch in (2, 5, 3):
        pixels = images(batch)
        assert_equal_to(compiled(pixels), model(pixels))
    torch._dynamo.reset()
    assert len(traced) <= 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pool": "max"}, "pool must be one of 'class', 'mean', got 'max'."),
        (
            {"position": "rotary"},
            "position must be one of 'learned', 'sinusoidal', 'relative', None, got 'rotary'.",
        ),
        ({"patch_size": 0}, "patch_size must be at least 1, got 0."),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0."),
        ({"patch_size": 4}, "image_size must be a multiple of patch_size 4, got 6 x 8. Crop or"),
        ({"heads": 3}, "embed_dim 8 must be divisible by num_heads 3"),
        ({"activation": "swish"}, "activation must be 'relu', 'gelu' or a function, got 'swish'."),
    ],
    ids=str,
)
def test_constructor_refuses(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make(**options)


def test_images_that_do_not_fit_are_named() -> None:
    model = make()
    for pixels in (images()[0], images()[:, :1]):
        with pytest.raises(ValueError, match=r"images must have shape \(batch, 2, height, width\)"):
            model(pixels)
    text = (
        "the size of images must be a multiple of patch_size 2, got 6 x 7. Crop or pad the images"
    )
    with pytest.raises(ValueError, match=text):
        model(images()[..., :7])
    with pytest.raises(ValueError, match="got 6 x 0"):
        model(images()[..., :0])
