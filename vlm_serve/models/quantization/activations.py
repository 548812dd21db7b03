"""The quantisation of activations, keys and values in a configuration: reported, not followed."""

from __future__ import annotations

from collections.abc import Iterable

from vlm_serve.models.quantization.fields import Fields

_SECTION = "activations"
_PLAIN_BITS = 16
"""From this width on activations are as they are."""


def described(wanted: Iterable[str]) -> str:
    """Return the wanted quantisation as text for tables."""
    joined = "; ".join(dict.fromkeys(wanted))
    if not joined:
        return "made for activations as they are"
    return f"made for quantised activations ({joined}), which is not followed"


def of_group(group: Fields) -> list[str]:
    """Return the wanted quantisation of inputs and outputs in a group of config_groups."""
    wanted = []
    for name, prefix in (("input_activations", ""), ("output_activations", "outputs ")):
        if group.get(name) is not None:
            fields = group.part(name)
            kind = "FP" if fields.get("type") == "float" else "int"
            dynamic = "dynamic" if fields.get("dynamic") else "static input_scale"
            scales = "" if prefix else f"{dynamic}, "
            wanted.append(f"{prefix}{scales}in {kind}{fields.get('num_bits', 8)}")
            fields.finish(_SECTION)
    return wanted


def of_keys(fields: Fields, *names: str) -> list[str]:
    """Return the wanted quantisation of keys and values.

    Args:
        fields: with objects, or names of types.
        names: of fields about keys and values.
    """
    wanted = []
    for name in names:
        value, bits = fields.get(name), 8
        if isinstance(value, dict) and value:
            scheme = fields.part(name)
            bits = scheme.get("num_bits", 8)
            for known in ("type", "dynamic"):
                scheme.get(known)
            scheme.finish(_SECTION)
        if value:
            wanted.append(f"{bits}-bit keys and values")
    return wanted


def of_auto_round(fields: Fields) -> list[str]:
    """Return the wanted quantisation in AutoRound's fields, also as GPTQ or AWQ."""
    bits, wanted = fields.get("act_bits"), []
    if isinstance(bits, int) and bits < _PLAIN_BITS:
        kind = str(fields.get("act_data_type") or "int")
        wanted.append(f"in {bits} bits, {kind}")
    return wanted + of_keys(fields, "static_kv_dtype", "static_attention_dtype")
