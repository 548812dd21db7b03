"""What compiled kernels are given of a step."""

from __future__ import annotations

import ctypes
from array import array

import pytest

from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.kernels.native_records import tables


def decoding(*block_tables: array[int] | tuple[int, ...]) -> DecodeMeta:
    count = len(block_tables)
    return DecodeMeta(block_tables, (1,) * count, (-1,) * count, tuple(range(count)), (-1,) * count)


@pytest.mark.parametrize("length", [1, 1000])
def test_a_table_of_int32_is_read_where_it_lies(length: int) -> None:
    """However long it is: nothing of it is copied for a step."""
    table = array("i", range(length))
    places, own = tables(decoding(table))
    assert own[0] is table
    assert list(places) == [table.buffer_info()[0]]


@pytest.mark.parametrize("table", [(5, 6, 7), array("q", (5, 6, 7))])
def test_other_tables_are_made_int32(table: array[int] | tuple[int, ...]) -> None:
    places, own = tables(decoding((1,), table))
    assert [each.typecode for each in own] == ["i", "i"]
    assert list((ctypes.c_int32 * 3).from_address(places[1])) == [5, 6, 7]
