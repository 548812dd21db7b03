"""Reads the rotary positions of a config.json, and the context that they are made for."""

from __future__ import annotations

from vlm_serve.errors import CheckpointError
from vlm_serve.models.config import ROTATIONS, Config
from vlm_serve.models.rope import Rope, Yarn, yarn_scale

_OLDER, _NEWER = ROTATIONS
_KINDS = ("default", "yarn")


def rope(text: Config, *, partial: bool, sections: bool) -> Rope:
    """Return the rotation of all or part of each head, by positions on three axes or on one."""
    fields = _fields(text)
    kind = _kind(fields)
    if not partial:
        fields.allow("partial_rotary_factor", 1)
    share = fields.positive("partial_rotary_factor") if partial else 1
    whole, theta = text.size("head_dim"), fields.positive("rope_theta")
    dims = int(whole * share)
    fits = 0 < dims <= whole and dims % 2 == 0
    yarn = _yarn(fields) if kind == "yarn" else None
    if yarn is not None and theta <= 1:
        raise CheckpointError(
            f"rope_theta in config.json must be more than 1 with YaRN, not {theta:g}"
        )
    if not sections:
        if not fits:
            raise CheckpointError(f"partial_rotary_factor {share} does not fit head_dim {whole}")
        return Rope(theta, dims, (dims // 2, 0, 0), yarn)
    fields.allow("mrope_interleaved", True)
    axes = tuple(fields.given("mrope_section"))
    if len(axes) != 3 or not fits:
        raise CheckpointError(f"mrope_section {list(axes)} does not fit {dims} dims")
    return Rope(theta, dims, (axes[0], axes[1], axes[2]), yarn)


def context(text: Config, rotation: Rope) -> int:
    """Return the tokens that the model is made for: those of config.json, or more with YaRN."""
    given = text.size("max_position_embeddings")
    return given if rotation.yarn is None else max(given, rotation.yarn.context)


def _fields(text: Config) -> Config:
    """Return the config with the fields of its rotation. As in transformers, `rope_scaling`
    replaces the whole of `rope_parameters`."""
    older, newer = text.inlined(_OLDER), text.inlined(_NEWER)
    if not (text.raw.get(_OLDER) and text.raw.get(_NEWER)):
        return text.inlined(_OLDER, _NEWER)
    for name in ("rope_theta", "partial_rotary_factor", "mrope_section"):
        lost = newer.raw.get(name)
        if lost is not None and older.raw.get(name) is None and older.given(name) != lost:
            raise _lost(name, lost)
    kind = newer.raw.get("rope_type", newer.raw.get("type"))
    if kind not in (None, "default") and kind != _kind(older):
        raise _lost("rope_type", kind)
    return older


def _lost(name: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{_OLDER} in config.json replaces {_NEWER}, whose {name} {value!r} would be lost: "
        f"write it into {_OLDER} too"
    )


def _kind(fields: Config) -> str:
    kind = fields.raw.get("rope_type", fields.raw.get("type"))
    if kind is None:
        return "default"
    if kind not in _KINDS:
        raise CheckpointError(f"rope_type {kind!r} is not supported, only 'default' and 'yarn'")
    return str(kind)


def _yarn(fields: Config) -> Yarn:
    """Return YaRN's numbers; those that are left out are transformers'."""
    raw, factor = fields.raw, fields.positive("factor")
    if factor < 1:
        raise CheckpointError(f"factor in config.json must be at least 1 with YaRN, not {factor:g}")
    original = "original_max_position_embeddings"
    names = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    numbers = {name: fields.positive(name) if raw.get(name) is not None else None for name in names}
    scale, top, bottom = (numbers[name] for name in names[:3])
    if scale is None:
        scale = yarn_scale(factor)
        if top is not None and bottom is not None:
            scale = yarn_scale(factor, top) / yarn_scale(factor, bottom)
    return Yarn(
        factor=factor,
        original=fields.size(original if raw.get(original) else "max_position_embeddings"),
        fast=numbers["beta_fast"] or 32,
        slow=numbers["beta_slow"] or 1,
        whole=bool(raw.get("truncate", True)),
        scale=scale,
    )
