"""A sampling option is one field: APIs, checks and documentation follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from sampling_table import sampling_table

from vlm_serve.errors import FieldError
from vlm_serve.sampling_params import SamplingParams, option
from vlm_serve.server.api.shared.fields import RequestModel
from vlm_serve.server.api.shared.sampling import (
    options_elsewhere,
    sampling_names,
    sampling_of,
    with_sampling,
)


@dataclass(frozen=True)
class More(SamplingParams):
    """The options and a new one."""

    typicality: float | None = option(
        None,
        "keeps tokens of typical surprise",
        0,
        1,
        names={"responses": ("typical",)},
        neutral=(1,),
    )


class Body(RequestModel):
    """A request without fields of its own."""


@pytest.mark.parametrize(
    ("api", "name"),
    [
        ("chat", "typicality"),
        ("completions", "typicality"),
        ("generate", "typicality"),
        ("responses", "typical"),
    ],
)
def test_a_new_option_is_read_and_checked_in_every_api(api: str, name: str) -> None:
    model = with_sampling(api, More)(Body)
    params: Any = sampling_of(api, model.model_validate({name: 0.5}), More)
    assert params.typicality == 0.5
    with pytest.raises(FieldError, match="typicality must be at least 0 and at most 1, got 2"):
        sampling_of(api, model.model_validate({name: 2}), More)
    assert sampling_of(api, model.model_validate({}), More) == More()


def test_a_new_option_is_refused_where_it_is_missing_and_named_where_it_differs() -> None:
    assert options_elsewhere("messages", More)["typicality"] == (1,)
    assert sampling_names("responses", More)["typicality"] == "typical"
    assert "typicality" not in sampling_names("chat", More)


def test_a_new_option_is_documented() -> None:
    (row,) = set(sampling_table(More).splitlines()) - set(sampling_table().splitlines())
    assert row.startswith("| `typicality` | `typical` | - | keeps tokens of typical surprise (at")
