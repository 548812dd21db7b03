"""The weights of a language model, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlm_serve.kernels.linear import Linear, Part
from vlm_serve.models.classifier import HEAD
from vlm_serve.models.parts.base import LoadedFeedForward, LoadedMixer, load_norm
from vlm_serve.models.spec import LayerSpec, ModelSpec
from vlm_serve.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: norm, token mixer, norm, feed-forward."""

    input_norm: torch.Tensor
    mixer: LoadedMixer
    post_norm: torch.Tensor
    feed_forward: LoadedFeedForward


def load_layer(spec: ModelSpec, layer: LayerSpec, source: Weights, name: str) -> Layer:
    """Load a layer of a model, whose tensors' names start with `name`."""
    hidden, norm = spec.hidden_size, spec.norm
    return Layer(
        input_norm=load_norm(source, f"{name}.{spec.input_norm}", hidden, norm),
        mixer=layer.mixer.load(source, name, hidden, norm),
        post_norm=load_norm(source, f"{name}.{spec.post_norm}", hidden, norm),
        feed_forward=layer.feed_forward.load(source, name, hidden),
    )


class Decoder:
    """The weights of a language model.

    Args:
        spec: the model.
        source: of the weights.
        prefix: of their names, except for the head's.
        head: name of the output projection; None: the embeddings are tied.
        pooled: what takes the place of that projection: another one, the ids of its rows that are
            kept, or the number of labels, each of which has a row of the head.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: Weights,
        prefix: str,
        head: str | None,
        pooled: Linear | tuple[int, ...] | int | None = None,
    ) -> None:
        table, shape = f"{prefix}embed_tokens.weight", (spec.vocab_size, spec.hidden_size)
        self.embedding = source.embedding(table, shape)
        rows: tuple[range, ...] = (source.ranks.share(spec.vocab_size),)
        if isinstance(pooled, tuple):
            rows = tuple(range(row, row + 1) for row in pooled)
        part = Part(head or table, shape, rows, least_bits=6)
        if isinstance(pooled, int):
            part = Part(HEAD, (pooled, spec.hidden_size), least_bits=16)
        self.head: Linear = pooled if isinstance(pooled, Linear) else source.linear(part)
        self.layers = tuple(
            load_layer(spec, layer, source, f"{prefix}layers.{index}")
            for index, layer in enumerate(spec.layers)
        )
        self.norm = load_norm(source, f"{prefix}{spec.last_norm}", spec.hidden_size, spec.norm)
