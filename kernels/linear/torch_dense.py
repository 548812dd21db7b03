"""Dense weights multiplied by torch: on GPUs, and on CPUs without compiled code."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

import torch
import torch.nn.functional as F

from vlm_serve.kernels.elementwise import silu_times
from vlm_serve.kernels.linear.base import ChangedRows, Epilogue, Linear
from vlm_serve.kernels.linear.few_rows import Around, few_rows, serves
from vlm_serve.kernels.linear.fixed import fixed_product, followed
from vlm_serve.kernels.linear.low_rank_factors import Reduced
from vlm_serve.kernels.norms import Normed


class TorchDense(Linear):
    """A dense weight, multiplied by torch.

    Args:
        weight: `[N, K]`.
        bias: `[N]` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.columns, self.depth = weight.shape
        self.dtype = weight.dtype
        self._weight, self._bias = weight, bias

    @classmethod
    def of(
        cls,
        pieces: Iterable[torch.Tensor],
        columns: int,
        depth: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        device: torch.device,
    ) -> TorchDense:
        """Stack `[n, K]` pieces by rows."""
        weight = torch.empty(columns, depth, dtype=dtype, device=device)
        first = 0
        for piece in pieces:
            weight[first : first + piece.shape[0]] = piece
            first += piece.shape[0]
        return cls(weight, None if bias is None else bias.to(device, dtype))

    def _multiply(self, x: torch.Tensor, after: Epilogue, deterministic: bool) -> torch.Tensor:
        if deterministic:
            return fixed_product(x.device, x, self._weight, self._bias, after)
        if after.activation is None and after.times is None and self._few(x):
            around = Around(plus=after.plus, overwrite=after.overwrite)
            return few_rows(x, self._weight, around)
        plus, by = after.plus, self._weight.T
        if after.activation == "gelu_tanh" and self._bias is not None and x.device.type != "cpu":
            # cuBLAS applies it to the sums, before they are rounded, in the product's launch.
            return torch._addmm_activation(self._bias, x, by, use_gelu=True)
        if plus is None or self._bias is not None or x.device.type == "cpu":
            return followed(F.linear(x, self._weight, self._bias), after)
        # Rounded once. Out of place, torch copies `plus` first, in a launch of its own.
        return plus.addmm_(x, by) if after.overwrite else torch.addmm(plus, x, by)

    def of_norm(
        self,
        x: Normed,
        *,
        gated: bool = False,
        widened: bool = False,
        deterministic: bool = False,
        changes: ChangedRows | None = None,
    ) -> torch.Tensor:
        # float16 has no room for rows before their norm.
        if deterministic or x.raw.dtype == torch.float16 or not self._few(x.raw):
            return super().of_norm(
                x, gated=gated, widened=widened, deterministic=deterministic, changes=changes
            )
        change = None if changes is None else changes.few(self.site, x.raw, x.weight)
        around = Around(x.weight, x.eps, gated=gated, widened=widened, change=change)
        return few_rows(x.raw, self._weight, around)

    def _changed(
        self, x: torch.Tensor, after: Epilogue, deterministic: bool, changes: ChangedRows | None
    ) -> torch.Tensor:
        plain = after.activation is None and after.times is None
        if changes is None or deterministic or not plain or not self._few(x):
            return super()._changed(x, after, deterministic, changes)
        change = changes.few(self.site, x)
        around = Around(plus=after.plus, overwrite=after.overwrite, change=change)
        return few_rows(x, self._weight, around)

    def with_change(
        self, x: torch.Tensor, after: Epilogue, deterministic: bool, change: Reduced
    ) -> torch.Tensor:
        weight, bias, plain = self._weight, self._bias, change.site.groups.plain
        if deterministic and after.activation is None and after.times is None:
            # One product of all rows: without a change it is the one without adapters.
            return fixed_product(x.device, x, weight, bias, after, change=change)
        # No library promises that a product's float32 sums round to the bits of its results in 16
        # bits. So rows without a change have the library's product, and the others have their own.
        if plain is None:
            out = self._multiply(x, after, deterministic)
        else:
            out = x.new_empty(len(x), self.columns)
            if len(plain):
                own = after.of(itemgetter(plain))
                out[plain] = self._multiply(x[plain], own, deterministic)
        return fixed_product(x.device, x, weight, bias, after, change=change, into=out)

    def _few(self, x: torch.Tensor) -> bool:
        """Return True if `few_rows` multiplies; decoders' projections have no bias."""
        return self._bias is None and serves(x, self._weight)

    def _gated(self, up: Linear, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        gate = self(x, deterministic=deterministic)
        return silu_times(gate, up(x, deterministic=deterministic))

    def _partial(self, x: torch.Tensor, deterministic: bool) -> torch.Tensor:
        if x.dtype == torch.float32:
            return self(x, deterministic=deterministic)
        if deterministic:
            out = fixed_product(x.device, x, self._weight, kind=torch.float32)
        elif x.device.type == "cpu":
            out = F.linear(x.float(), self._weight.float())
        else:
            out = torch.mm(x, self._weight.T, out_dtype=torch.float32)
        return out if self._bias is None else out + self._bias.float()

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)
