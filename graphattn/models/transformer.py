"""The Transformer, encoder and decoder or one of them, for sequences side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn.inits import reset

from graphattn import patterns
from graphattn._checks import check_choice
from graphattn.graph import Graph
from graphattn.nn.attention import KeyValueCache
from graphattn.nn.block import GraphTransformerDecoderLayer, GraphTransformerLayer
from graphattn.nn.encoding import (
    AlibiBias,
    LearnedEncoding,
    RelativeBias,
    RotaryEncoding,
    SinusoidalEncoding,
)
from graphattn.patterns import Length

__all__ = ["Generation", "Transformer"]

_POSITIONS = ("sinusoidal", "learned", "rotary", "alibi", "relative", None)
_TIES = ("output", "all", None)


class Generation(NamedTuple):
    """What :meth:`Transformer.generate` has found.

    Attributes:
        tokens: For each sequence its new tokens, int64, without those it started with and without
            ``end``. One of ``max_length`` tokens did not come to its end.
        scores: ``[B]``, the score of each: the logarithm of its probability, ``end`` included,
            over the length penalty.
    """

    tokens: list[Tensor]
    scores: Tensor


class Transformer(nn.Module):
    r"""The Transformer: an encoder of the source, and a decoder that is told about it.

    .. math:: m = \mathrm{encoder}(\sqrt{d}\, E_s[s] + P), \qquad
        z = \mathrm{decoder}(\sqrt{d}\, E_t[t] + P, m), \qquad \mathrm{logits} = z\, E_t^\top

    with self-attention of the source along one graph, of the target along a second (causal), and
    from source to target along a third. Source: "Attention Is All You Need"
    (https://arxiv.org/abs/1706.03762). Parameters of ``encoder`` and ``decoder`` and their names
    are those of ``torch.nn.Transformer``.

    The sequences of a batch lie side by side, ``[sum(length)]`` tokens: nothing is padded, and no
    sequence knows of another. Any graph can take the place of the three: :mod:`graphattn.patterns`
    has windows, global tokens and more.

    Three models in one: both halves; with ``num_decoder_layers=0`` an encoder, as for labelling
    each frame of speech; with ``num_encoder_layers=0`` a decoder without attention to a source, a
    language model, whose layers are :class:`~graphattn.nn.GraphTransformerLayer`.

    Args:
        d_model: Width of the model.
        nhead: Number of heads; divides ``d_model``.
        num_encoder_layers: Layers of the encoder; 0 for no encoder.
        num_decoder_layers: Layers of the decoder; 0 for no decoder.
        dim_feedforward: Size of the hidden layer of the feed-forward networks.
        dropout: Probability of dropping embeddings, attention weights, hidden units and residual
            branches in training.
        activation: ``"relu"``, ``"gelu"`` or a function on tensors.
        src_tokens: Number of different source tokens; ``None`` where the source is features
            ``[N, d_model]``.
        tgt_tokens: Number of different target tokens; ``None`` where the target is features
            ``[N, d_model]`` and so is the output.
        tie_embeddings: ``"output"``: the embedding of target tokens is the output projection too,
            without a bias. ``"all"``: and the embedding of source tokens, whose vocabulary is then
            the same. ``None``: each is a matrix of its own.
        position: How it knows of the order of tokens. ``"sinusoidal"`` and ``"learned"`` are added
            to the embeddings, ``"rotary"`` turns queries and keys, ``"alibi"`` and ``"relative"``
            are biases of the scores, all but the first two in self-attention only. ``None``: it
            does not, but for what graphs tell.
        max_length: For ``"learned"`` the longest sequence, for ``"relative"`` the distance beyond
            which distances are not told apart.
        norm_first: Pre-norm instead of post-norm.
        backend: As in :func:`graphattn.graph_attention`.

    Raises:
        ValueError: A number is out of range, a name is unknown, or options exclude each other.

    >>> model = Transformer(16, 4, 1, 1, 32, src_tokens=10, tgt_tokens=12)
    >>> src, tgt = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 7, 0, 8, 9])
    >>> logits = model(src, tgt, src_length=[3, 2], tgt_length=[2, 3])
    >>> logits.shape
    torch.Size([5, 12])
    >>> found = model.generate(src, [3, 2], start=0, end=11, max_length=4)
    >>> len(found.tokens)
    2

    A language model, and an encoder of features:

    >>> model = Transformer(16, 4, 0, 2, 32, tgt_tokens=12)
    >>> model(None, tgt, tgt_length=[2, 3]).shape
    torch.Size([5, 12])
    >>> model = Transformer(16, 4, 2, 0, 32)
    >>> model(torch.randn(5, 16), src_length=[3, 2], src_graph=patterns.window([3, 2], 1)).shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        *,
        src_tokens: int | None = None,
        tgt_tokens: int | None = None,
        tie_embeddings: str | None = "output",
        position: str | None = "sinusoidal",
        max_length: int = 512,
        norm_first: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_choice("Transformer", _POSITIONS, position=position)
        check_choice("Transformer", _TIES, tie_embeddings=tie_embeddings)
        if min(num_encoder_layers, num_decoder_layers) < 0 or not (
            num_encoder_layers or num_decoder_layers
        ):
            raise ValueError(
                "Transformer: expected numbers of layers that are not negative, and one of them "
                f"positive, got num_encoder_layers={num_encoder_layers}, "
                f"num_decoder_layers={num_decoder_layers}."
            )
        for name, tokens, layers in (
            ("src_tokens", src_tokens, num_encoder_layers),
            ("tgt_tokens", tgt_tokens, num_decoder_layers),
        ):
            if tokens is not None and (tokens < 1 or not layers):
                raise ValueError(
                    f"Transformer: {name} must be at least 1, or None where there is no such half "
                    f"of the model, got {tokens} for {layers} layers."
                )
        if tie_embeddings == "all" and (src_tokens is None or src_tokens != tgt_tokens):
            raise ValueError(
                "Transformer: tie_embeddings='all' needs one vocabulary, src_tokens == tgt_tokens, "
                f"got {src_tokens} and {tgt_tokens}."
            )
        self.d_model = d_model
        self.tgt_tokens = tgt_tokens

        def embedding(tokens: int | None) -> nn.Embedding | None:
            return None if tokens is None else nn.Embedding(tokens, d_model)

        def encoding(layers: int) -> nn.Module | None:
            if not layers or position not in ("sinusoidal", "learned"):
                return None
            if position == "sinusoidal":
                return SinusoidalEncoding(d_model)
            return LearnedEncoding(max_length, d_model)

        def stack(layers: int, *, cross: bool) -> _Stack | None:
            if not layers:
                return None
            kind = GraphTransformerDecoderLayer if cross else GraphTransformerLayer
            bias: nn.Module | None = None
            if position == "alibi":
                bias = AlibiBias(nhead)
            elif position == "relative":
                bias = RelativeBias(nhead, max_length)
            return _Stack(
                [
                    kind(
                        d_model,
                        nhead,
                        dim_feedforward,
                        dropout,
                        deepcopy(activation),
                        norm_first=norm_first,
                        rotary=RotaryEncoding(d_model // nhead) if position == "rotary" else None,
                        backend=backend,
                    )
                    for _ in range(layers)
                ],
                nn.LayerNorm(d_model),
                bias,
            )

        self.src_embedding = None if tie_embeddings == "all" else embedding(src_tokens)
        self.tgt_embedding = embedding(tgt_tokens)
        self.tied_source = tie_embeddings == "all"
        self.src_encoding = encoding(num_encoder_layers)
        self.tgt_encoding = encoding(num_decoder_layers)
        self.dropout = nn.Dropout(dropout)
        self.encoder = stack(num_encoder_layers, cross=False)
        self.decoder = stack(num_decoder_layers, cross=num_encoder_layers > 0)
        self.output = (
            nn.Linear(d_model, tgt_tokens)
            if tgt_tokens is not None and tie_embeddings is None
            else None
        )
        self.reset_parameters()

    @classmethod
    def from_torch(cls, module: nn.Transformer, *, backend: str = "auto") -> Transformer:
        """The graph form of a ``torch.nn.Transformer``, with a copy of its parameters.

        It takes features and adds no positions, as torch's module does. On complete graphs in
        the encoder, causal ones in the decoder (torch's ``tgt_mask``) and complete ones between,
        which are the defaults, it gives the same numbers.

        Raises:
            ValueError: The module was built with an encoder or decoder of another class, or with
                one that has no layers.
        """
        encoder, decoder = module.encoder, module.decoder
        if (
            not isinstance(encoder, nn.TransformerEncoder)
            or not isinstance(decoder, nn.TransformerDecoder)
            or not (len(encoder.layers) and len(decoder.layers))
        ):
            raise ValueError(
                "Transformer.from_torch: expected a torch.nn.TransformerEncoder and a "
                "torch.nn.TransformerDecoder with layers, got "
                f"{type(encoder).__name__} and {type(decoder).__name__}."
            )
        model = cls(module.d_model, module.nhead, 1, 1, 1, position=None, backend=backend)
        model.encoder = _Stack(
            [GraphTransformerLayer.from_torch(layer, backend=backend) for layer in encoder.layers],
            deepcopy(encoder.norm),
        )
        model.decoder = _Stack(
            [
                GraphTransformerDecoderLayer.from_torch(layer, backend=backend)
                for layer in decoder.layers
            ],
            deepcopy(decoder.norm),
        )
        return model.train(module.training)

    def reset_parameters(self) -> None:
        """Draws all parameters anew: matrices as torch does, what is added up with variance 1."""
        for child in self.children():
            reset(child)
        for part in (self.encoder, self.decoder, self.output):
            for name, parameter in () if part is None else part.named_parameters():
                if parameter.dim() > 1 and "position_bias" not in name:
                    nn.init.xavier_uniform_(parameter)
        for embedding in (self.src_embedding, self.tgt_embedding):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=self.d_model**-0.5)
        for encoding in (self.src_encoding, self.tgt_encoding):
            if isinstance(encoding, LearnedEncoding):
                nn.init.normal_(encoding.weight)

    def forward(
        self,
        src: Tensor | None,
        tgt: Tensor | None = None,
        src_length: Length | None = None,
        tgt_length: Length | None = None,
        *,
        src_graph: Graph | Tensor | None = None,
        tgt_graph: Graph | Tensor | None = None,
        cross_graph: Graph | Tensor | None = None,
        return_attention_weights: bool = False,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Encodes the source and decodes the target: :meth:`encode`, then :meth:`decode`.

        Args:
            src: ``[N]`` int64 tokens, or features ``[N, d_model]`` where the model was built
                without ``src_tokens``; ``None`` without an encoder.
            tgt: ``[M]`` int64 tokens, or features ``[M, d_model]``: for each token to predict the
                one before it. ``None`` without a decoder.
            src_length: Lengths of the source sequences. Default one of all tokens.
            tgt_length: Lengths of the target sequences.
            src_graph: Along which the source attends to itself, :class:`~graphattn.Graph` or
                ``edge_index``. Default :func:`graphattn.patterns.complete`.
            tgt_graph: Along which the target attends to itself. Default
                :func:`graphattn.patterns.causal`.
            cross_graph: Along which the target attends to the source. Default
                :func:`graphattn.patterns.cross`.
            return_attention_weights: Also return the weights ``[E, nhead]`` of each layer, before
                dropout: of the decoder those along ``cross_graph``; with one half of the model
                only, those of its self-attention.

        Returns:
            ``[M, tgt_tokens]``, logits of the next token; ``[M, d_model]`` without ``tgt_tokens``;
            ``[N, d_model]``, the encoder's output, without a decoder. Or a pair with the list of
            weights.

        Raises:
            TypeError: Tokens are given where the model was built for features, or the reverse.
            ValueError: An input is missing, or given to a model without that half; lengths do not
                add up, or graphs do not fit.
        """
        if self.decoder is None:
            _check_absent(
                "a decoder",
                tgt=tgt,
                tgt_length=tgt_length,
                tgt_graph=tgt_graph,
                cross_graph=cross_graph,
            )
            out, weights = self._encode(src, src_length, src_graph, return_attention_weights)
        else:
            memory = None
            if self.encoder is None:
                _check_absent("an encoder", src=src, src_length=src_length, src_graph=src_graph)
            else:
                memory = self._encode(src, src_length, src_graph, False)[0]
            out, weights = self._decode(
                tgt,
                memory,
                tgt_length,
                src_length,
                tgt_graph,
                cross_graph,
                return_attention_weights,
            )
        return (out, weights) if return_attention_weights else out

    def encode(
        self,
        src: Tensor,
        src_length: Length | None = None,
        *,
        graph: Graph | Tensor | None = None,
    ) -> Tensor:
        """The encoder's output, ``[N, d_model]``; arguments and errors as in :meth:`forward`."""
        return self._encode(src, src_length, graph, False)[0]

    def decode(
        self,
        tgt: Tensor,
        memory: Tensor | None = None,
        tgt_length: Length | None = None,
        src_length: Length | None = None,
        *,
        graph: Graph | Tensor | None = None,
        cross_graph: Graph | Tensor | None = None,
    ) -> Tensor:
        """The decoder's output for ``memory``, the encoder's; the rest as in :meth:`forward`."""
        return self._decode(tgt, memory, tgt_length, src_length, graph, cross_graph, False)[0]

    @torch.no_grad()
    def generate(
        self,
        src: Tensor | None = None,
        src_length: Length | None = None,
        *,
        start: int | Sequence[Tensor],
        end: int,
        max_length: int,
        num_beams: int = 1,
        length_penalty: float = 0.0,
        use_cache: bool = True,
        src_graph: Graph | Tensor | None = None,
        tgt_pattern: Callable[[Tensor], Tensor] = patterns.causal,
    ) -> Generation:
        r"""Continues each sequence with likely tokens until it ends: greedy or beam search.

        .. math:: \mathrm{score}(y) = \Big( \sum_{t=1}^{T} \log p(y_t \mid y_{<t}, \mathrm{src})
            \Big) \Big/ \Big( \frac{5 + T}{6} \Big)^{\alpha}

        with the length penalty :math:`\alpha` of "Google's Neural Machine Translation System"
        (https://arxiv.org/abs/1609.08144) over all :math:`T` new tokens, ``end`` included. Of all
        continuations of the hypotheses the ``num_beams`` most probable are looked at: those that
        end are done, and the ``num_beams`` best that do not are continued. A sequence is finished
        once none of its hypotheses can become better than the best that has ended; of those, and
        of those still without end at ``max_length``, the one with the best score is returned. One
        beam is greedy search.

        Hypotheses form a tree: what they have in common is computed once, and each attends to the
        tokens on its way from the root, which is a graph. Keys and values are kept for the whole
        tree, those of the source for all hypotheses together, and nothing is copied when beams are
        dropped or split. In evaluation mode and without gradients, whatever the model's mode.

        Args:
            src: As in :meth:`forward`.
            src_length: Lengths of the source sequences.
            start: The token that every sequence starts with, or a prompt for each, int64 ``[L]``
                with at least one token. Without an encoder, the prompts tell how many sequences
                there are; one for a token.
            end: The token that ends a sequence.
            max_length: Largest number of new tokens.
            num_beams: Number of hypotheses that are continued for each sequence.
            length_penalty: :math:`\alpha`. At 0 the most probable is best; above, longer ones are
                favoured.
            use_cache: Keep keys and values. ``False`` computes all tokens of all hypotheses anew
                for each new token, with the same result.
            src_graph: As in :meth:`forward`.
            tgt_pattern: Makes of lengths the graph along which the target attends to itself, for
                instance ``lambda length: patterns.window(length, 16, 0)``. What a token attends to
                must not depend on tokens after it.

        Returns:
            The new tokens of each sequence, and their scores.

        Raises:
            ValueError: The model predicts no tokens, a number is out of range, or there is not one
                prompt for each source sequence.
        """
        decoder, vocabulary = self.decoder, self.tgt_tokens
        if decoder is None or vocabulary is None:
            raise ValueError(
                "Transformer: generate needs a decoder that predicts tokens, but the model was "
                "built without tgt_tokens."
            )
        _check_search(vocabulary, end, max_length, num_beams)
        memory: Tensor | None = None
        length: Tensor | None = None
        if self.encoder is None:
            _check_absent("an encoder", src=src, src_length=src_length, src_graph=src_graph)
        else:
            src, length = _sequences("src", src, src_length)
        prompt, prompt_length = self._prompt(start, length)
        batch = prompt_length.numel()
        with _evaluating(self):
            if self.encoder is not None:
                memory = self._encode(src, length, src_graph, False)[0]
            live = _Hypotheses(
                self, decoder, memory, length, prompt, prompt_length, tgt_pattern, use_cache
            )
            score = live.log_prob.new_zeros(batch, 1)
            best = live.log_prob.new_full((batch,), -math.inf)
            tokens = prompt.new_zeros(batch, max_length)
            size = prompt_length.new_zeros(batch)
            penalty = ((5 + torch.arange(max_length + 1).to(best)) / 6) ** length_penalty
            for step in range(1, max_length + 1):
                total = score.unsqueeze(-1) + live.log_prob  # [S, K, V]
                top, choice = total.flatten(1).topk(min(num_beams, total.shape[1:].numel()))
                ended = (choice % vocabulary == end) | (step == max_length)
                final, which = top.masked_fill(~ended, -math.inf).max(dim=1)
                final = final / penalty[step]
                better = final > best[live.sequence]
                winner, choice = live.sequence[better], choice[better, which[better]]
                best[winner] = final[better]
                tokens[winner, : step - 1] = live.tokens(better, choice // vocabulary)
                tokens[winner, step - 1] = choice % vocabulary
                size[winner] = step - (choice % vocabulary == end).long()
                total[..., end] = -math.inf
                # What is not complete can only become less probable.
                hope = total.flatten(1).amax(dim=1) / penalty[step:].amax()
                going = hope > best[live.sequence]
                if step == max_length or not going.any():
                    break
                width = min(num_beams, total.size(1) * (vocabulary - 1))
                score, choice = total[going].flatten(1).topk(width)
                live.grow(going, choice // vocabulary, choice % vocabulary)
        return Generation([row[:n] for row, n in zip(tokens, size.tolist(), strict=True)], best)

    def _encode(
        self,
        src: Tensor | None,
        src_length: Length | None,
        graph: Graph | Tensor | None,
        return_attention_weights: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        if self.encoder is None:
            raise ValueError("Transformer: the model was built without an encoder.")
        embedding = self.tgt_embedding if self.tied_source else self.src_embedding
        src, length = _sequences("src", src, src_length)
        position = patterns.position(length)
        return self.encoder(
            self._inputs("src", src, position, embedding, self.src_encoding),
            patterns.complete(length) if graph is None else graph,
            position,
            return_attention_weights=return_attention_weights,
        )

    def _decode(
        self,
        tgt: Tensor | None,
        memory: Tensor | None,
        tgt_length: Length | None,
        src_length: Length | None,
        graph: Graph | Tensor | None,
        cross_graph: Graph | Tensor | None,
        return_attention_weights: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        if self.decoder is None:
            raise ValueError("Transformer: the model was built without a decoder.")
        tgt, length = _sequences("tgt", tgt, tgt_length)
        if self.encoder is None:
            _check_absent("an encoder", memory=memory, cross_graph=cross_graph)
        else:
            memory, memory_length = _sequences("memory", memory, src_length)
            if cross_graph is None:
                cross_graph = patterns.cross(memory_length, length)
            cross_graph = Graph.of(cross_graph, (memory.size(0), tgt.size(0)))
        position = patterns.position(length)
        out, weights = self.decoder(
            self._inputs("tgt", tgt, position, self.tgt_embedding, self.tgt_encoding),
            patterns.causal(length) if graph is None else graph,
            position,
            memories=None if memory is None else [memory] * len(self.decoder.layers),
            cross_graph=cross_graph,
            return_attention_weights=return_attention_weights,
        )
        return self._logits(out), weights

    def _logits(self, out: Tensor) -> Tensor:
        if self.output is not None:
            return self.output(out)
        return out if self.tgt_embedding is None else F.linear(out, self.tgt_embedding.weight)

    def _inputs(
        self,
        name: str,
        x: Tensor,
        position: Tensor,
        embedding: nn.Embedding | None,
        encoding: nn.Module | None,
    ) -> Tensor:
        if embedding is not None and (x.dtype != torch.int64 or x.dim() != 1):
            raise TypeError(
                f"Transformer: {name} must be int64 tokens [N], since the model was built with "
                f"{name}_tokens={embedding.num_embeddings}, got a {x.dtype} tensor of shape "
                f"{tuple(x.shape)}."
            )
        if embedding is None and (not x.is_floating_point() or x.shape[1:] != (self.d_model,)):
            raise TypeError(
                f"Transformer: {name} must be features [N, {self.d_model}], since the model was "
                f"built without {name}_tokens, got a {x.dtype} tensor of shape {tuple(x.shape)}."
            )
        if embedding is not None:
            x = embedding(x) * math.sqrt(self.d_model)
        if encoding is not None:
            x = x + encoding(position).to(x.dtype)
        # Features to which nothing is added pass as they are, as in torch.nn.Transformer.
        return x if embedding is None and encoding is None else self.dropout(x)

    def _prompt(
        self, start: int | Sequence[Tensor], src_length: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The tokens that sequences start with, side by side, and how many each has."""
        device = next(self.parameters()).device
        if isinstance(start, int):
            ones = torch.ones(1 if src_length is None else src_length.numel(), dtype=torch.int64)
            return (start * ones).to(device), ones.to(device)
        if src_length is not None and len(start) != src_length.numel():
            raise ValueError(
                "Transformer: start must be one token, or a prompt for each of the "
                f"{src_length.numel()} source sequences, got {len(start)} prompts."
            )
        for prompt in start:
            if prompt.dtype != torch.int64 or prompt.dim() != 1 or prompt.numel() == 0:
                raise ValueError(
                    "Transformer: each prompt must be int64 tokens [L], at least one, got a "
                    f"{prompt.dtype} tensor of shape {tuple(prompt.shape)}."
                )
        length = torch.tensor([prompt.numel() for prompt in start], dtype=torch.int64)
        prompts = [torch.empty(0, dtype=torch.int64), *start]
        return torch.cat([prompt.to(device) for prompt in prompts]), length.to(device)


class _Stack(nn.Module):
    """``encoder`` or ``decoder``: layers one after the other, and a normalisation.

    ``position_bias`` makes of graph and positions a bias of self-attention, for all layers.
    """

    def __init__(
        self,
        layers: Sequence[GraphTransformerLayer | GraphTransformerDecoderLayer],
        norm: nn.Module | None,
        position_bias: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.position_bias = position_bias
        self.rotates = any(layer.self_attn.rotary is not None for layer in layers)

    def forward(
        self,
        x: Tensor,
        graph: Graph | Tensor,
        position: Tensor,
        *,
        source_position: Tensor | None = None,
        memories: Sequence[Tensor | tuple[Tensor, Tensor]] | None = None,
        cross_graph: Graph | Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        return_attention_weights: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """The output, and what the layers return of their weights.

        With ``caches``, one for each layer, the rows of ``x`` come after those that the caches
        hold, and ``source_position`` has the positions of all. ``memories``, one for each layer,
        make it a decoder.
        """
        if source_position is None:
            source_position = position
        graph = Graph.of(graph, (source_position.numel(), position.numel()))
        bias = None
        if self.position_bias is not None:
            bias = self.position_bias(graph, (source_position, position))
        weights = []
        for index, layer in enumerate(self.layers):
            inputs = (graph,) if memories is None else (memories[index], graph, cross_graph)
            x = layer(
                x,
                *inputs,
                bias=bias,
                position=position if self.rotates else None,
                cache=None if caches is None else caches[index],
                return_attention_weights=return_attention_weights,
            )
            if return_attention_weights:
                x, alpha = x
                weights.append(alpha)
        return x if self.norm is None else self.norm(x), weights


class _Hypotheses:
    """The beginnings of sequences that a search is still at, ``K`` for each of ``S`` sequences.

    Every token looked at is a node; the first nodes are the prompts. A hypothesis is a prompt and
    a path of nodes after it, and hypotheses share the nodes that they have in common.

    Attributes:
        sequence: ``[S]``, which sequences are not finished.
        log_prob: ``[S, K, V]``, of the next token of each hypothesis.
    """

    def __init__(
        self,
        model: Transformer,
        decoder: _Stack,
        memory: Tensor | None,
        memory_length: Tensor | None,
        prompt: Tensor,
        prompt_length: Tensor,
        pattern: Callable[[Tensor], Tensor],
        use_cache: bool,
    ) -> None:
        self.model, self.decoder, self.pattern = model, decoder, pattern
        self.memory, self.memory_length = memory, memory_length
        self.prompt_length = prompt_length
        self.token, self.position = prompt, patterns.position(prompt_length)
        self.sequence = torch.arange(prompt_length.numel(), device=prompt.device)
        self.path = prompt.new_empty(prompt_length.numel(), 1, 0)  # [S, K, new tokens]
        self.caches = [KeyValueCache() for _ in decoder.layers] if use_cache else None
        self.projected = None
        if memory is not None and use_cache:
            self.projected = [
                layer.multihead_attn.project_source(memory, memory)
                for layer in decoder.layers
                if isinstance(layer, GraphTransformerDecoderLayer)
            ]
        self.log_prob = self._compute(torch.ones_like(prompt_length))

    def tokens(self, which: Tensor, beam: Tensor) -> Tensor:
        """The new tokens of one hypothesis of each of the sequences ``which [S]`` bool."""
        return self.token[self.path[which, beam]]

    def grow(self, going: Tensor, beam: Tensor, token: Tensor) -> None:
        """Goes on with the sequences ``going [S]`` bool: ``token [S', K]`` comes after ``beam``."""
        self.sequence = self.sequence[going]
        path = self.path[going].gather(1, beam.unsqueeze(-1).expand(-1, -1, self.path.size(2)))
        node = torch.arange(token.numel(), device=token.device) + self.token.numel()
        self.path = torch.cat([path, node.view(*token.shape, 1)], dim=2)
        place = (self.prompt_length[self.sequence] + path.size(2)).unsqueeze(1).expand_as(token)
        self.token = torch.cat([self.token, token.flatten()])
        self.position = torch.cat([self.position, place.flatten()])
        count = torch.zeros_like(self.prompt_length)
        self.log_prob = self._compute(count.index_fill(0, self.sequence, token.size(1)))

    def _compute(self, count: Tensor) -> Tensor:
        """``log_prob`` of the hypotheses, of which each sequence has ``count [B]``."""
        flat = self.path.flatten(0, 1)
        each = torch.arange(flat.size(0), device=flat.device).unsqueeze(1).expand_as(flat)
        paths = torch.stack([flat.flatten(), each.flatten()])
        edges = torch.cat([patterns.cross(self.prompt_length, count), paths], dim=1)
        # From each hypothesis to its tokens. Sorting keeps their order: the prompt, then the path.
        ways = Graph(edges, (self.token.numel(), flat.size(0)))
        logits = (
            self._anew(ways, count)
            if self.caches is None
            else self._further(self.caches, ways, count)
        )
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.log_softmax(-1, dtype=wide).view(*self.path.shape[:2], logits.size(1))

    def _anew(self, ways: Graph, count: Tensor) -> Tensor:
        """Logits after the last token of each hypothesis, from all its tokens."""
        length, memory, memory_length = ways.in_degree(), None, None
        if self.memory is not None and self.memory_length is not None:
            sources = patterns.cross(self.memory_length, count)
            memory = self.memory[sources[0]]
            memory_length = sources[1].bincount(minlength=length.numel())
        logits, _ = self.model._decode(
            self.token[ways.src_index],
            memory,
            length,
            memory_length,
            self.pattern(length),
            None,
            False,
        )
        return logits[length.cumsum(0) - 1]

    def _further(self, caches: list[KeyValueCache], ways: Graph, count: Tensor) -> Tensor:
        """The same from those tokens that are not in the caches yet."""
        model = self.model
        length, node = ways.in_degree(), ways.src_index
        known = 0 if caches[0].key is None else caches[0].key.size(0)
        new = self.position[known:]
        if known > 0 and self.pattern is patterns.causal:
            graph = ways
        else:
            src, dst = node[self.pattern(length)]
            edges = torch.stack([src, dst - known])[:, dst >= known]
            graph = Graph(edges, (self.token.numel(), new.numel()))
        cross_graph = None
        if self.memory is not None and self.memory_length is not None:
            edges = patterns.cross(self.memory_length, count if known > 0 else length)
            cross_graph = Graph(edges, (self.memory.size(0), new.numel()))
        out, _ = self.decoder(
            model._inputs("tgt", self.token[known:], new, model.tgt_embedding, model.tgt_encoding),
            graph,
            new,
            source_position=self.position,
            memories=self.projected,
            cross_graph=cross_graph,
            caches=caches,
        )
        return model._logits(out[node[length.cumsum(0) - 1] - known])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode; each module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _sequences(name: str, x: Tensor | None, length: Length | None) -> tuple[Tensor, Tensor]:
    """``x`` and the lengths ``[B]`` of the sequences that lie in it side by side."""
    if x is None:
        raise ValueError(f"Transformer: {name} is missing; the model was built for it.")
    if length is None:
        return x, torch.tensor([x.size(0)], device=x.device)
    sizes = torch.as_tensor(length, device=x.device).reshape(-1)
    if sizes.numel() == 0:
        sizes = sizes.long()  # an empty list has no dtype of its own
    if int(sizes.sum()) != x.size(0):
        raise ValueError(
            f"Transformer: the lengths of {name} must add up to its {x.size(0)} rows, got "
            f"{sizes.tolist()}."
        )
    return x, sizes


def _check_search(vocabulary: int, end: int, max_length: int, num_beams: int) -> None:
    if not 0 <= end < vocabulary or vocabulary < 2:
        raise ValueError(
            f"Transformer: end must be one of at least 2 tokens, from 0 to {vocabulary - 1}, got "
            f"{end}."
        )
    if max_length < 1 or num_beams < 1:
        raise ValueError(
            "Transformer: max_length and num_beams must be at least 1, got "
            f"{max_length} and {num_beams}."
        )


def _check_absent(half: str, **inputs: object) -> None:
    for name, given in inputs.items():
        if given is not None:
            raise ValueError(
                f"Transformer: {name} is given, but the model was built without {half}."
            )
