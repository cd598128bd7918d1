"""Transformer: torch's numbers, no leaks, every option trains, and decoding with a cache."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn import Graph, patterns
from graphattn.models.transformer import Generation, Transformer
from parity import TOLERANCE, assert_equal_to, assert_same_gradients, leaf

POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", "relative", None]
SRC_LENGTH, TGT_LENGTH = [3, 1, 5], [2, 4, 3]
END, START, VOCABULARY = 0, 1, 7


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(51)


def torch_model(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Transformer:
    """Torch's model in which every parameter has been moved from where it starts."""
    options = {"dropout": 0.0, "batch_first": True} | options
    if options.get("norm_first"):
        # Torch warns that its encoder then has no fast path.
        model = nn.Transformer(8, 2, 1, 1, 12, **options)
        layers = nn.TransformerEncoderLayer(8, 2, 12, **options)
        model.encoder = nn.TransformerEncoder(
            layers, 2, nn.LayerNorm(8), enable_nested_tensor=False
        )
        model.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(8, 2, 12, **options), 3, nn.LayerNorm(8)
        )
    else:
        model = nn.Transformer(8, 2, 2, 3, 12, **options)
    model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def small(**options: Any) -> Transformer:
    """A model of two tokens' vocabularies, both halves unless told otherwise."""
    defaults: dict[str, Any] = {
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "dim_feedforward": 12,
        "dropout": 0.0,
        "src_tokens": 9,
        "tgt_tokens": VOCABULARY,
        "max_length": 16,
    }
    if options.get("num_encoder_layers") == 0:
        del defaults["src_tokens"]
    if options.get("num_decoder_layers") == 0:
        del defaults["tgt_tokens"]
    return Transformer(8, 2, **(defaults | options))


def lively(**options: Any) -> Transformer:
    """One in float64 whose next token, without any training, depends on the tokens before it."""
    defaults = {"norm_first": True, "tie_embeddings": None, "position": "learned"}
    return small(**(defaults | options)).double()


def split(tokens: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    return tokens.split(lengths)


# The same numbers #################################################################################


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_equals_torch_with_padding_on_its_side_and_none_on_ours(
    activation: str, norm_first: bool, dtype: torch.dtype
) -> None:
    theirs = torch_model(dtype, activation=activation, norm_first=norm_first)
    ours = Transformer.from_torch(theirs)
    src, tgt = leaf(3, 5, 8, dtype=dtype), leaf(3, 4, 8, dtype=dtype)
    no_src = torch.arange(5) >= torch.tensor(SRC_LENGTH)[:, None]
    no_tgt = torch.arange(4) >= torch.tensor(TGT_LENGTH)[:, None]
    expected = theirs(
        src,
        tgt,
        tgt_mask=torch.ones(4, 4, dtype=torch.bool).triu(1),
        src_key_padding_mask=no_src,
        tgt_key_padding_mask=no_tgt,
        memory_key_padding_mask=no_src,
    )[~no_tgt]
    out = ours(src[~no_src], tgt[~no_tgt], SRC_LENGTH, TGT_LENGTH)
    assert_same_gradients(ours, theirs, out, expected, [src, tgt])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_any_graph_can_take_the_place_of_the_three() -> None:
    theirs = torch_model()
    ours = Transformer.from_torch(theirs)
    src, tgt = leaf(1, 6, 8), leaf(1, 5, 8)
    masks = [torch.rand(size) < 0.5 for size in ((6, 6), (5, 5), (5, 6))]
    for mask in masks:
        mask[:, 0] = False
    graphs = [Graph.from_mask(~mask) for mask in masks]
    for given in (graphs, [graph.edge_index for graph in graphs]):
        src_graph, tgt_graph, cross_graph = given
        out = ours(
            src[0], tgt[0], src_graph=src_graph, tgt_graph=tgt_graph, cross_graph=cross_graph
        )
        expected = theirs(src, tgt, src_mask=masks[0], tgt_mask=masks[1], memory_mask=masks[2])
        assert_same_gradients(ours, theirs, out, expected[0], [src, tgt])
    # And not that of the model without them.
    assert not torch.allclose(ours(src[0], tgt[0]), expected[0])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_state_dicts_load_strictly_both_ways() -> None:
    theirs = torch_model()
    ours = Transformer(8, 2, 2, 3, 12, 0.0, position=None).double()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    src, tgt = torch.randn(5, 8).double(), torch.randn(4, 8).double()
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    assert_equal_to(ours(src, tgt), theirs(src[None], tgt[None], tgt_mask=mask)[0])
    theirs.load_state_dict(ours.state_dict(), strict=True)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_from_torch_copies_what_was_changed_and_what_is_missing() -> None:
    theirs = torch_model(dropout=0.1).eval()
    theirs.encoder.layers[1].dropout1.p = theirs.decoder.layers[2].dropout3.p = 0.4
    theirs.encoder.norm = None
    ours = Transformer.from_torch(theirs, backend="eager")
    assert not ours.training
    assert not ours.encoder.layers[0].training
    assert ours.decoder.layers[0].multihead_attn.backend == "eager"
    assert ours.encoder.norm is None
    assert [layer.dropout1.p for layer in ours.encoder.layers] == [0.1, 0.4]
    assert [layer.dropout3.p for layer in ours.decoder.layers] == [0.1, 0.1, 0.4]
    originals = {parameter.data_ptr() for parameter in theirs.parameters()}
    assert not originals & {parameter.data_ptr() for parameter in ours.parameters()}
    src, tgt = torch.randn(5, 8).double(), torch.randn(4, 8).double()
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    assert_equal_to(ours(src, tgt), theirs(src[None], tgt[None], tgt_mask=mask)[0])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_from_torch_refuses_what_it_does_not_know() -> None:
    text = "got Identity and TransformerDecoder"
    with pytest.raises(ValueError, match=text):
        Transformer.from_torch(nn.Transformer(8, 2, 1, 1, custom_encoder=nn.Identity()))
    with pytest.raises(ValueError, match="TransformerDecoder with layers, got Tr"):
        Transformer.from_torch(nn.Transformer(8, 2, 1, 0))


def test_draws_parameters_as_torch_does() -> None:
    ours = Transformer(64, 4, 1, 1, 96, position=None)
    theirs = nn.Transformer(64, 4, 1, 1, 96, batch_first=True)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(7.0)
    ours.reset_parameters()
    for name, parameter in ours.named_parameters():
        like = theirs.get_parameter(name)
        assert not (parameter == 7.0).any(), name
        assert parameter.abs().max() <= 1.1 * like.abs().max(), name
        if parameter.dim() > 1:
            torch.testing.assert_close(parameter.std(), like.std(), rtol=0.1, atol=0.0)


# What goes in and comes out #######################################################################


def test_tokens_are_embedded_scaled_and_told_their_position() -> None:
    model = small(position="sinusoidal").double()
    bare = Transformer(8, 2, 2, 2, 12, 0.0, position=None).double()
    bare.encoder.load_state_dict(model.encoder.state_dict())
    bare.decoder.load_state_dict(model.decoder.state_dict())
    src, tgt = torch.randint(9, (9,)), torch.randint(VOCABULARY, (9,))

    def inputs(tokens: Tensor, embedding: nn.Embedding, lengths: list[int]) -> Tensor:
        rows = []
        for sequence in split(tokens, lengths):
            for place, token in enumerate(sequence):
                wave = [
                    (math.sin, math.cos)[channel % 2](place / 10000 ** (channel // 2 * 2 / 8))
                    for channel in range(8)
                ]
                # Encodings of whole numbers are in the default dtype.
                wave = torch.tensor(wave).double()
                rows.append(embedding.weight[token] * math.sqrt(8) + wave)
        return torch.stack(rows)

    out = bare(
        inputs(src, model.src_embedding, SRC_LENGTH),
        inputs(tgt, model.tgt_embedding, TGT_LENGTH),
        SRC_LENGTH,
        TGT_LENGTH,
    )
    expected = out @ model.tgt_embedding.weight.t()
    torch.testing.assert_close(
        model(src, tgt, SRC_LENGTH, TGT_LENGTH), expected, rtol=0.0, atol=1e-6
    )


def test_what_is_tied_is_one_parameter() -> None:
    names = {
        name: {
            key
            for key in small(src_tokens=7, tie_embeddings=name).state_dict()
            if "coder" not in key
        }
        for name in ("output", "all", None)
    }
    assert names == {
        "output": {"src_embedding.weight", "tgt_embedding.weight"},
        "all": {"tgt_embedding.weight"},
        None: {"src_embedding.weight", "tgt_embedding.weight", "output.weight", "output.bias"},
    }
    model = small(src_tokens=7, tie_embeddings="all")
    src, tgt = torch.tensor([3]), torch.tensor([1, 2])
    memory, logits = model.encode(src), model.decode(tgt, torch.zeros(1, 8))
    with torch.no_grad():
        model.tgt_embedding.weight[3, 0] += 1.0  # all would add the sum of a layer norm: 0
    assert not torch.allclose(model.encode(src), memory)
    changed = model.decode(tgt, torch.zeros(1, 8)) != logits
    assert changed[:, 3].all()
    assert not changed[:, [0, 1, 2, 4, 5, 6]].any()


def test_weights_of_cross_attention_on_request() -> None:
    model = small().eval()
    src, tgt = torch.randint(9, (9,)), torch.randint(VOCABULARY, (9,))
    out, weights = model(src, tgt, SRC_LENGTH, TGT_LENGTH, return_attention_weights=True)
    assert torch.equal(out, model(src, tgt, SRC_LENGTH, TGT_LENGTH))
    edges = patterns.cross(SRC_LENGTH, TGT_LENGTH)
    assert [tuple(alpha.shape) for alpha in weights] == [(edges.size(1), 2)] * 2
    for alpha in weights:
        total = torch.zeros(9, 2).index_add(0, edges[1], alpha)
        torch.testing.assert_close(total, torch.ones(9, 2))
    # One half alone gives those of its self-attention.
    model = small(num_encoder_layers=0)
    _, weights = model(None, tgt, None, TGT_LENGTH, return_attention_weights=True)
    assert [alpha.size(0) for alpha in weights] == [patterns.causal(TGT_LENGTH).size(1)] * 2
    model = small(num_decoder_layers=0)
    _, weights = model(src, None, SRC_LENGTH, return_attention_weights=True)
    assert [alpha.size(0) for alpha in weights] == [patterns.complete(SRC_LENGTH).size(1)] * 2


def test_features_in_tokens_out_and_the_reverse() -> None:
    features, tokens = torch.randn(9, 8), torch.randint(VOCABULARY, (9,))
    model = small(src_tokens=None)
    assert model(features, tokens, SRC_LENGTH, TGT_LENGTH).shape == (9, VOCABULARY)
    assert len(model.generate(features, SRC_LENGTH, start=1, end=0, max_length=3).tokens) == 3
    model = small(tgt_tokens=None)
    assert model(tokens, features, SRC_LENGTH, TGT_LENGTH).shape == (9, 8)


def test_an_encoder_alone_is_its_encode() -> None:
    model = small(num_decoder_layers=0, src_tokens=None)
    x = torch.randn(9, 8)
    graph = patterns.window(SRC_LENGTH, 1)
    out = model(x, src_length=SRC_LENGTH, src_graph=graph)
    assert torch.equal(out, model.encode(x, SRC_LENGTH, graph=graph))
    assert model.decoder is None
    assert not torch.equal(out, model.encode(x, SRC_LENGTH))


def test_lengths_in_every_form_and_none_at_all() -> None:
    model = small()
    src, tgt = torch.randint(9, (6,)), torch.randint(VOCABULARY, (4,))
    out = model(src, tgt, [6], [4])
    for lengths in ((6, 4), (torch.tensor([6]), torch.tensor(4)), (None, None)):
        assert torch.equal(model(src, tgt, *lengths), out)
    empty = torch.empty(0, dtype=torch.int64)
    assert model(empty, empty, [], []).shape == (0, VOCABULARY)
    assert model(empty, tgt, [0], [4]).isfinite().all()  # nothing to attend to


# Nothing leaks ####################################################################################


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("layers", [(2, 2), (0, 2)])
def test_batch_equals_its_parts(layers: tuple[int, int], position: str | None) -> None:
    model = small(
        num_encoder_layers=layers[0], num_decoder_layers=layers[1], position=position
    ).double()
    src = torch.randint(9, (9,)) if layers[0] else None
    tgt = torch.randint(VOCABULARY, (9,))
    together = model(src, tgt, SRC_LENGTH if layers[0] else None, TGT_LENGTH)
    sources = [None] * 3 if src is None else split(src, SRC_LENGTH)
    alone = [model(s, t) for s, t in zip(sources, split(tgt, TGT_LENGTH), strict=True)]
    assert_equal_to(together, torch.cat(alone))


@pytest.mark.parametrize("position", POSITIONS)
def test_no_gradient_from_what_comes_later_or_from_another_sequence(position: str | None) -> None:
    model = small(src_tokens=None, tgt_tokens=None, position=position).double()
    src, tgt = leaf(9, 8), leaf(9, 8)
    out = model(src, tgt, SRC_LENGTH, TGT_LENGTH)
    of_src, of_tgt = patterns.batch_vector(SRC_LENGTH), patterns.batch_vector(TGT_LENGTH)
    for row in range(9):
        from_src, from_tgt = torch.autograd.grad(
            (out[row] * torch.arange(8)).sum(), [src, tgt], retain_graph=True
        )
        seen_src = of_src == of_tgt[row]
        seen_tgt = (of_tgt == of_tgt[row]) & (torch.arange(9) <= row)
        assert torch.count_nonzero(from_src[~seen_src]) == 0
        assert torch.count_nonzero(from_tgt[~seen_tgt]) == 0
        assert (from_src[seen_src].abs().sum(1) > 0.0).all()
        assert from_tgt[row].abs().sum() > 0.0


@pytest.mark.parametrize("position", POSITIONS)
def test_all_but_none_know_the_order_of_tokens(position: str | None) -> None:
    model = small(num_decoder_layers=0, position=position).double()
    if position == "relative":
        nn.init.normal_(model.encoder.position_bias.weight)
    tokens = torch.tensor([3, 1, 4, 5])
    order = torch.tensor([1, 2, 0, 3])
    same = torch.allclose(model(tokens[order]), model(tokens)[order], rtol=0.0, atol=1e-9)
    assert same == (position is None)


# Training #########################################################################################


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_c51_every_parameter_of_every_option_gets_a_gradient(
    norm_first: bool, position: str | None
) -> None:
    src, tgt = torch.randint(9, (9,)), torch.randint(VOCABULARY, (9,))
    for options in (
        {"tie_embeddings": None, "activation": nn.PReLU()},
        {"src_tokens": VOCABULARY, "tie_embeddings": "all", "activation": "gelu"},
        {"tie_embeddings": "output"},
        {"num_encoder_layers": 0},
        {"num_decoder_layers": 0},
        {"src_tokens": None, "tgt_tokens": None},
    ):
        model = small(position=position, norm_first=norm_first, **options)
        own = torch.randn(9, 8) if options.get("src_tokens", 0) is None else None
        source = own if own is not None else src % VOCABULARY
        target = own if own is not None else tgt
        if model.encoder is None:
            out = model(None, target, None, TGT_LENGTH)
        elif model.decoder is None:
            out = model(source, None, SRC_LENGTH)
        else:
            out = model(source, target, SRC_LENGTH, TGT_LENGTH)
        (out * torch.randn_like(out)).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, (options, name)
            assert parameter.grad.abs().max() > 0.0, (options, name)


def test_each_layer_has_its_own_activation() -> None:
    model = small(activation=nn.PReLU())
    layers = [*model.encoder.layers, *model.decoder.layers]
    assert len({id(layer.activation.weight) for layer in layers}) == 4


def copy_task(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Source, target, next tokens, and lengths of the source: to be copied, then ``END``."""
    length = torch.randint(1, 5, (16,), generator=generator)
    src = torch.randint(2, VOCABULARY, (int(length.sum()),), generator=generator)
    sequences = split(src, length.tolist())
    tgt = torch.cat([torch.cat([torch.tensor([START]), sequence]) for sequence in sequences])
    following = torch.cat([torch.cat([sequence, torch.tensor([END])]) for sequence in sequences])
    return src, tgt, following, length


@functools.cache
def trained(position: str | None, encoder: bool = True) -> tuple[Transformer, list[float]]:
    """A model after some steps of the copy task, and its losses."""
    torch.manual_seed(3)
    model = Transformer(
        16,
        2,
        1 if encoder else 0,
        1,
        32,
        0.0,
        src_tokens=VOCABULARY if encoder else None,
        tgt_tokens=VOCABULARY,
        position=position,
        max_length=16,
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(60):
        src, tgt, following, length = copy_task(generator)
        source = (src, tgt, length) if encoder else (None, tgt, None)
        loss = F.cross_entropy(model(*source, length + 1), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.double(), losses


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("encoder", [True, False])
def test_every_option_learns(encoder: bool, position: str | None) -> None:
    _, losses = trained(position, encoder)
    # The best that is possible without the source is what a token tells of the next one.
    assert sum(losses[-5:]) / 5 < (1.2 if encoder else 1.75)
    assert losses[0] > 2.0


def test_c45_dropout_in_training_only_and_on_embeddings_too() -> None:
    model = small(dropout=0.3)
    src, tgt = torch.randint(9, (9,)), torch.randint(VOCABULARY, (9,))
    inputs = (src, tgt, SRC_LENGTH, TGT_LENGTH)
    assert not torch.equal(model(*inputs), model(*inputs))
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.eval()
    assert not torch.equal(model(*inputs), model(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs))
    # Features to which nothing is added are not dropped, as in torch's module.
    model = small(src_tokens=None, num_decoder_layers=0, position=None, dropout=0.3)
    for layer in model.encoder.layers:
        layer.eval()
    x = torch.randn(9, 8)
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("tie", ["output", "all", None])
def test_state_dict_copies_and_reset(tie: str | None, position: str | None) -> None:
    model = small(src_tokens=VOCABULARY, tie_embeddings=tie, position=position)
    tokens = torch.randint(VOCABULARY, (9,))
    inputs = (tokens, tokens, SRC_LENGTH, TGT_LENGTH)
    expected = model(*inputs)
    expected.sum().backward()
    twin = small(src_tokens=VOCABULARY, tie_embeddings=tie, position=position)
    assert not torch.equal(twin(*inputs), expected)
    twin.load_state_dict(model.state_dict(), strict=True)
    for other in (twin, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(*inputs), expected)
    twin.reset_parameters()
    assert not torch.equal(twin(*inputs), expected)


@pytest.mark.parametrize("position", POSITIONS)
def test_c07_low_precision(position: str | None) -> None:
    model, tokens = small(position=position, src_tokens=VOCABULARY), torch.randint(VOCABULARY, (9,))
    inputs = (tokens, tokens, SRC_LENGTH, TGT_LENGTH)
    expected = model(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(*inputs).float(), expected, rtol=0.1, atol=0.1)
    model = model.to(torch.bfloat16)
    out = model(*inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
    scores = model.generate(tokens, SRC_LENGTH, start=START, end=END, max_length=3).scores
    assert scores.dtype == torch.float32


# Decoding #########################################################################################


def assert_same_generation(found: Generation, expected: Generation) -> None:
    assert [row.tolist() for row in found.tokens] == [row.tolist() for row in expected.tokens]
    torch.testing.assert_close(found.scores, expected.scores, rtol=0.0, atol=1e-9)


def sources(model: Transformer) -> dict[str, Any]:
    """Four source sequences, one of them empty, or none at all for a decoder."""
    if model.encoder is None:
        return {}
    return {"src": torch.tensor([2, 3, 4, 5, 6, 2, 2, 3]), "src_length": [3, 1, 0, 4]}


PROMPTS = [torch.tensor(tokens) for tokens in ([1], [1, 4], [2, 3, 5], [1])]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("encoder", [True, False])
@pytest.mark.parametrize("kind", ["trained", "untrained"])
def test_a_cache_changes_nothing(kind: str, encoder: bool, position: str | None) -> None:
    if kind == "trained":
        model = trained(position, encoder)[0]
    else:
        model = lively(num_encoder_layers=2 if encoder else 0, position=position)
    for num_beams, start in itertools.product((1, 3), (START, PROMPTS)):
        options = {"start": start, "end": END, "max_length": 6, "num_beams": num_beams}
        expected = model.generate(**sources(model), **options, use_cache=False)
        assert_same_generation(model.generate(**sources(model), **options), expected)
        assert len(expected.tokens) == (1 if not encoder and start == START else 4)


def greedy(model: Transformer, src: Tensor | None, prompt: Tensor, max_length: int) -> Tensor:
    """The most probable token, again and again, with nothing but forward."""
    tokens = prompt
    for _ in range(max_length):
        token = model(src, tokens)[-1].argmax().view(1)
        if token.item() == END:
            break
        tokens = torch.cat([tokens, token])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("encoder", [True, False])
@pytest.mark.parametrize("kind", ["trained", "untrained"])
def test_one_beam_is_greedy_search(kind: str, encoder: bool) -> None:
    if kind == "trained":
        model = trained("learned", encoder)[0]
    else:
        model = lively(num_encoder_layers=2 if encoder else 0)
    given = sources(model)
    rows = split(given["src"], given["src_length"]) if encoder else [None] * 4
    for penalty in (0.0, 2.0):
        found = model.generate(
            **given, start=PROMPTS, end=END, max_length=7, length_penalty=penalty
        )
        for tokens, src, prompt in zip(found.tokens, rows, PROMPTS, strict=True):
            assert tokens.tolist() == greedy(model, src, prompt, 7).tolist()


def best_of_all(
    model: Transformer, src: Tensor, max_length: int, penalty: float
) -> tuple[list[int], float]:
    """The best sequence of all that there are, and its score."""
    full = list(itertools.product(range(model.tgt_tokens), repeat=max_length))
    tokens = torch.tensor(full)
    before = F.pad(tokens[:, :-1], (1, 0), value=START)
    with torch.no_grad():
        logits = model(
            src.repeat(len(full)),
            before.flatten(),
            [len(src)] * len(full),
            [max_length] * len(full),
        )
    log_prob = logits.log_softmax(-1).gather(1, tokens.view(-1, 1)).view(-1, max_length)
    best: tuple[list[int], float] = ([], -math.inf)
    for row, each in zip(full, log_prob.tolist(), strict=True):
        length = row.index(END) + 1 if END in row else max_length
        score = sum(each[:length]) / ((5 + length) / 6) ** penalty
        if score > best[1]:
            best = ([token for token in row[:length] if token != END], score)
    return best


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.5, -1.0])
def test_beams_for_all_find_the_best_of_all(penalty: float) -> None:
    differs = 0
    for seed in range(4):
        torch.manual_seed(seed)
        model = lively(tgt_tokens=4, num_encoder_layers=1, num_decoder_layers=1)
        options = {"start": START, "end": END, "max_length": 4, "length_penalty": penalty}
        src, length = torch.tensor([1, 2, 3, 4, 5]), [3, 2]
        found = model.generate(src, length, **options, num_beams=4**4)
        narrow = model.generate(src, length, **options)
        for index, row in enumerate(split(src, length)):
            tokens, score = best_of_all(model, row, 4, penalty)
            assert found.tokens[index].tolist() == tokens
            assert abs(found.scores[index].item() - score) < 1e-9
            assert narrow.scores[index] <= found.scores[index] + 1e-12
            differs += narrow.tokens[index].tolist() != tokens
    assert differs > 0, "greedy search finds the best: the cases are too easy"


def test_many_poor_endings_do_not_stop_the_best_hypothesis() -> None:
    """Every step offers a poor end: as many have ended as there are beams when the best goes on."""
    model = Transformer(4, 1, 0, 1, 4, tgt_tokens=3, tie_embeddings=None)
    probabilities = torch.tensor([0.98, 0.01, 0.01])  # the same whatever came before
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias.copy_(probabilities.log())
    for use_cache in (True, False):
        found = model.generate(
            start=[torch.tensor([0])], end=2, max_length=9, num_beams=2, use_cache=use_cache
        )
        assert found.tokens[0].tolist() == [0] * 9
        assert found.scores.item() == pytest.approx(9 * math.log(0.98), abs=1e-5)


def test_scores_are_those_of_the_tokens() -> None:
    model = lively()
    given = sources(model)
    for num_beams in (1, 2, 5):
        found = model.generate(**given, start=START, end=END, max_length=5, num_beams=num_beams)
        for tokens, score, src in zip(
            found.tokens, found.scores, split(given["src"], given["src_length"]), strict=True
        ):
            ended = torch.tensor([END] if len(tokens) < 5 else [], dtype=torch.int64)
            new = torch.cat([tokens, ended])
            log_prob = model(src, torch.cat([torch.tensor([START]), new[:-1]])).log_softmax(-1)
            total = log_prob.gather(1, new[:, None]).sum()
            torch.testing.assert_close(total.detach(), score, rtol=0.0, atol=1e-9)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_batch_decodes_as_its_parts(num_beams: int) -> None:
    model = lively()
    given = sources(model)
    options = {"end": END, "max_length": 6, "num_beams": num_beams, "length_penalty": 0.6}
    together = model.generate(**given, start=PROMPTS, **options)
    alone = [
        model.generate(src, start=[prompt], **options)
        for src, prompt in zip(split(given["src"], given["src_length"]), PROMPTS, strict=True)
    ]
    parts = Generation([one.tokens[0] for one in alone], torch.cat([one.scores for one in alone]))
    assert_same_generation(together, parts)


def test_it_copies_what_it_has_learned_to_copy_and_stops_by_itself() -> None:
    model = trained("learned")[0]
    src, _, _, length = copy_task(torch.Generator().manual_seed(1))
    for num_beams in (1, 4):
        found = model.generate(
            src, length, start=START, end=END, max_length=12, num_beams=num_beams
        )
        right = [
            found_row.tolist() == row.tolist()
            for found_row, row in zip(found.tokens, split(src, length.tolist()), strict=True)
        ]
        assert sum(right) >= 14
        assert max(len(row) for row in found.tokens) < 12


def test_a_finished_sequence_costs_nothing_more() -> None:
    model, rows = trained("learned")[0], []
    hook = model.decoder.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
    with hook:
        src, length = torch.tensor([2, 3, 4, 5, 6]), [1, 4]
        found = model.generate(src, length, start=START, end=END, max_length=9)
    assert [len(row) for row in found.tokens] == [1, 4]
    assert rows == [2, 2, 1, 1, 1]  # two starts, two tokens, then the longer sequence alone


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_source_is_projected_once(use_cache: bool) -> None:
    model = small(num_decoder_layers=1)
    calls, project = [], model.decoder.layers[0].multihead_attn.project_source

    def counted(key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(len(key))
        return project(key, value, **options)

    model.decoder.layers[0].multihead_attn.project_source = counted
    model.generate(
        **sources(model), start=START, end=END, max_length=4, num_beams=3, use_cache=use_cache
    )
    assert (calls == [8]) == use_cache


@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "relative"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_window_attention_decodes_with_a_cache_too(num_beams: int, position: str) -> None:
    model = lively(position=position)

    def window(length: Tensor) -> Tensor:
        return patterns.window(length, 1, 0)

    options = {"start": PROMPTS, "end": END, "max_length": 6, "num_beams": num_beams}
    found = model.generate(**sources(model), **options, tgt_pattern=window)
    again = model.generate(**sources(model), **options, tgt_pattern=window, use_cache=False)
    assert_same_generation(found, again)
    causal = model.generate(**sources(model), **options)
    assert not torch.allclose(found.scores, causal.scores)


def test_the_graph_of_the_source_counts_in_decoding() -> None:
    model = lively()
    given = sources(model)
    options = {"start": START, "end": END, "max_length": 4}
    window = patterns.window(given["src_length"], 0)
    with_graph = model.generate(**given, **options, src_graph=window)
    assert not torch.allclose(with_graph.scores, model.generate(**given, **options).scores)


def test_generate_leaves_the_model_as_it_was() -> None:
    model = small(dropout=0.5)
    model.encoder.eval()
    before = {name: module.training for name, module in model.named_modules()}
    given = sources(model)
    first = model.generate(**given, start=START, end=END, max_length=4)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert_same_generation(model.generate(**given, start=START, end=END, max_length=4), first)
    assert not first.scores.requires_grad
    with pytest.raises(IndexError):
        model.generate(torch.tensor([99]), start=START, end=END, max_length=4)
    assert {name: module.training for name, module in model.named_modules()} == before


def test_more_beams_than_hypotheses_one_token_and_no_sequence() -> None:
    model = small(tgt_tokens=2)
    found = model.generate(**sources(model), start=START, end=END, max_length=2, num_beams=50)
    assert all(set(row.tolist()) <= {1} for row in found.tokens)
    found = model.generate(**sources(model), start=START, end=END, max_length=1, num_beams=2)
    assert all(len(row) <= 1 for row in found.tokens)
    empty = torch.empty(0, dtype=torch.int64)
    found = model.generate(empty, [], start=START, end=END, max_length=3)
    assert found.tokens == []
    assert found.scores.shape == (0,)
    assert small(num_encoder_layers=0).generate(start=[], end=END, max_length=3).tokens == []


def test_learned_positions_reach_up_to_their_number() -> None:
    model = lively(max_length=5, tgt_tokens=50)
    src = torch.tensor([1, 2])
    found = model.generate(src, start=START, end=END, max_length=5)
    assert len(found.tokens[0]) == 5
    with pytest.raises(
        IndexError, match="LearnedEncoding: the table of axis 0 has positions 0 to 4"
    ):
        model.generate(src, start=START, end=END, max_length=6)


# Refusals #########################################################################################


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"position": "sine"},
            "position must be one of 'sinusoidal', 'learned', 'rotary', 'alibi', 'relative', None",
        ),
        (
            {"tie_embeddings": True},
            "tie_embeddings must be one of 'output', 'all', None, got True.",
        ),
        (
            {"num_encoder_layers": 0, "num_decoder_layers": 0},
            "and one of them positive, got num_encoder_layers=0, num_decoder_layers=0.",
        ),
        ({"num_decoder_layers": -1}, "got num_encoder_layers=2, num_decoder_layers=-1."),
        (
            {"num_encoder_layers": 0, "src_tokens": 9},
            "or None where there is no such half of the model, got 9 for 0 layers.",
        ),
        ({"tgt_tokens": 0}, "tgt_tokens must be at least 1"),
        (
            {"tie_embeddings": "all"},
            "tie_embeddings='all' needs one vocabulary, src_tokens == tgt_tokens, got 9 and 7.",
        ),
        ({"nhead": 3}, "embed_dim 8 must be divisible by num_heads 3"),
        ({"nhead": 8, "position": "rotary"}, "head_dim must be even"),
        ({"activation": "swish"}, "activation must be 'relu', 'gelu' or a function, got 'swish'"),
    ],
    ids=str,
)
def test_c42_constructor_refuses(options: dict[str, Any], text: str) -> None:
    defaults = {
        "d_model": 8,
        "nhead": 2,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "src_tokens": 9,
        "tgt_tokens": 7,
    }
    with pytest.raises(ValueError, match=re.escape(text)):
        Transformer(**(defaults | options))


TOKENS, FEATURES = torch.tensor([1, 2, 3]), torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("options", "given", "error", "text"),
    [
        ({}, {"src": TOKENS}, ValueError, "tgt is missing; the model was built for it."),
        ({}, {"src": None, "tgt": TOKENS}, ValueError, "src is missing; the model was built for"),
        (
            {"num_encoder_layers": 0},
            {"src": TOKENS, "tgt": TOKENS},
            ValueError,
            "src is given, but the model was built without an encoder.",
        ),
        (
            {"num_decoder_layers": 0},
            {"src": TOKENS, "tgt": TOKENS},
            ValueError,
            "tgt is given, but the model was built without a decoder.",
        ),
        (
            {"num_encoder_layers": 0},
            {"src": None, "tgt": TOKENS, "cross_graph": TOKENS},
            ValueError,
            "cross_graph is given, but the model was built without an encoder.",
        ),
        (
            {},
            {"src": FEATURES, "tgt": TOKENS},
            TypeError,
            "the model was built with src_tokens=9, got a torch.float32 tensor of shape (3, 8).",
        ),
        (
            {"src_tokens": None},
            {"src": TOKENS, "tgt": TOKENS},
            TypeError,
            "src must be features [N, 8], since the model was built without src_tokens, got a",
        ),
        (
            {},
            {"src": TOKENS, "tgt": TOKENS[None]},
            TypeError,
            "tgt must be int64 tokens [N], since the model was built with tgt_tokens=7",
        ),
        (
            {},
            {"src": TOKENS, "tgt": TOKENS, "src_length": [2, 2]},
            ValueError,
            "the lengths of src must add up to its 3 rows, got [2, 2].",
        ),
        (
            {},
            {"src": TOKENS, "tgt": TOKENS, "tgt_length": [1, 2]},
            ValueError,
            "cross: num_src and num_dst must have one number for each pair, got 1 and 2.",
        ),
        (
            {},
            {"src": TOKENS, "tgt": TOKENS, "src_graph": Graph(patterns.complete(4), 4)},
            ValueError,
            "the graph has 4 sources and 4 targets, but the features have 3 and 3.",
        ),
    ],
    ids=str,
)
def test_forward_refuses(
    options: dict[str, Any], given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        small(**options)(**given)


def test_halves_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="the model was built without an encoder"):
        small(num_encoder_layers=0).encode(TOKENS)
    with pytest.raises(ValueError, match="the model was built without a decoder"):
        small(num_decoder_layers=0).decode(TOKENS, FEATURES)
    with pytest.raises(ValueError, match="memory is missing; the model was built for it"):
        small().decode(TOKENS)
    with pytest.raises(ValueError, match="memory is given, but the model was built without an enc"):
        small(num_encoder_layers=0).decode(TOKENS, FEATURES)


@pytest.mark.parametrize(
    ("options", "given", "text"),
    [
        ({"tgt_tokens": None}, {}, "generate needs a decoder that predicts tokens, but the model"),
        ({"num_decoder_layers": 0}, {}, "generate needs a decoder that predicts tokens"),
        ({}, {"end": 7}, "end must be one of at least 2 tokens, from 0 to 6, got 7."),
        ({}, {"max_length": 0}, "max_length and num_beams must be at least 1, got 0 and 1."),
        ({}, {"num_beams": 0}, "max_length and num_beams must be at least 1, got 4 and 0."),
        ({}, {"start": [TOKENS, TOKENS]}, "a prompt for each of the 1 source sequences, got 2"),
        ({}, {"start": [TOKENS[:0]]}, "each prompt must be int64 tokens [L], at least one, got a"),
        ({}, {"start": [FEATURES]}, "got a torch.float32 tensor of shape (3, 8)."),
        ({}, {"src": None}, "src is missing; the model was built for it."),
        ({"num_encoder_layers": 0}, {}, "src is given, but the model was built without an enc"),
    ],
    ids=str,
)
def test_generate_refuses(options: dict[str, Any], given: dict[str, Any], text: str) -> None:
    defaults = {"src": TOKENS, "start": START, "end": END, "max_length": 4}
    with pytest.raises(ValueError, match=re.escape(text)):
        small(**options).generate(**(defaults | given))
