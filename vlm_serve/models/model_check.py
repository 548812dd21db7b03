"""Compares the fields that config.json leaves to transformers' classes with the tensors."""

from __future__ import annotations

import logging
from collections import defaultdict

from vlm_serve.errors import CheckpointError
from vlm_serve.models.spec import ModelSpec
from vlm_serve.models.weights import Weights

_log = logging.getLogger(__name__)
_COUNTS = ("num_hidden_layers", "depth")


def check_defaults(spec: ModelSpec, weights: Weights) -> None:
    """Log the defaults that were used, and refuse a number of layers that the tensors contradict.

    Other sizes are compared when their tensors are read; surplus layers would silently not be read.

    Raises CheckpointError that names the field.
    """
    fields: dict[str, list[str]] = defaultdict(list)
    for place, source in spec.defaulted.items():
        fields[source].append(place)
        section, _, name = place.rpartition(".")
        if name in _COUNTS:
            of_vision = section == "vision_config"
            _check_count(spec, weights, place, source, of_vision=of_vision)
    for source, names in fields.items():
        _log.info("config.json leaves %s to transformers' %s", ", ".join(names), source)


def _check_count(
    spec: ModelSpec, weights: Weights, place: str, source: str, *, of_vision: bool
) -> None:
    wanted, start = len(spec.layers), f"{weights.text_prefix}layers."
    if of_vision:
        assert spec.vision is not None
        wanted = spec.vision.depth
        start = weights.vision_prefix(spec.vision.anchor) + spec.vision.layers
    found = weights.count(start)
    if found != wanted:
        raise CheckpointError(
            f"the checkpoint has tensors of {found} layers ({start}*), but config.json lacks "
            f"{place}, and the default of transformers' {source} is {wanted}"
        )
