"""Products as a decode step calls them: in sequence, in one call of compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from vlm_serve.kernels.linear import Linear
from vlm_serve.kernels.native_layout import struct
from vlm_serve.kernels.native_library import call
from vlm_serve.models.program import Program


def in_a_step(weights: Sequence[Linear], x: torch.Tensor) -> Callable[[], object]:
    """What runs a step of `[rows, K]` in the type of `x` that has nothing but products with
    `weights` of one shape, behind a norm of its rows."""
    program = Program(x.dtype, x.shape[1])
    program.norm(torch.zeros(x.shape[1]), 1e-6)
    out = program.view("out", weights[0].columns)
    for weight in weights:
        program.product(weight, program.normed, out)
    record, bits = program.record(), 8 * x.itemsize
    step = struct("Step")(tokens=len(x), threads=torch.get_num_threads(), x=x.data_ptr())
    alive = program, x

    def run() -> object:
        call("vlm_step", ctypes.byref(record), ctypes.byref(step), bits)
        return alive

    return run
