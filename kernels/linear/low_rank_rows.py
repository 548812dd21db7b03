"""The changes of a step's rows by a GPU's kernels.

Rows without an adapter get what the base computes for them. For the others a kernel takes the
product in float32, adds the change, and does what follows before it rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import torch

from vlm_serve.kernels.dispatch import Op
from vlm_serve.kernels.elementwise import ACTIVATIONS
from vlm_serve.kernels.linear import low_rank_host
from vlm_serve.kernels.linear.base import Epilogue, Linear
from vlm_serve.kernels.linear.low_rank_records import Groups, Reduced, Site


class Sums(NamedTuple):
    """Products in float32 that changes are added to.

    Attributes:
        values: `[rows, N]`.
        by_place: True if row i is that of `order[i]`; otherwise rows are the step's.
        after: what follows the sum, for all rows of the step.
    """

    values: torch.Tensor
    by_place: bool
    after: Epilogue


def _extended_by_torch(out: torch.Tensor, sums: Sums, change: Reduced) -> None:
    groups, after = change.site.groups, sums.after
    added = low_rank_host.addition(change, out.shape[1])
    place_of = {row: place for place, row in enumerate(groups.order.tolist())}
    for _, rows in low_rank_host.groups(change.site):
        places = [place_of[row] for row in rows.tolist()] if sums.by_place else rows
        total = sums.values[places].float() + added[rows]
        if after.activation is not None:
            total = ACTIVATIONS[after.activation](total)
        if after.times is not None:
            total = total * after.times[rows].float()
        if after.plus is not None:
            total = total + after.plus[rows].float()
        out[rows] = total.to(out.dtype)


_TRITON = "vlm_serve.kernels.linear.low_rank_triton"
_reduced = Op(low_rank_host.reduced, triton=f"{_TRITON}:reduced")
_extended = Op(_extended_by_torch, triton=f"{_TRITON}:extended")


def by_kernels(device: torch.device) -> bool:
    """Return True if kernels add the changes of rows on a device."""
    return _extended.on_triton(device)


class GroupedRows:
    """The rows of a step beside the records of its adapters.

    Args:
        records: int64 `[adapters, sites + 1, RECORD]`, on the device.
        widths: returns the most elements of u at a site.
        groups: returns the rows that a site's changes reach.
    """

    def __init__(
        self,
        records: torch.Tensor,
        widths: Callable[[int], int],
        groups: Callable[[int], Groups],
    ) -> None:
        self._records, self._widths, self._groups = records, widths, groups

    def at(self, site: int) -> Site:
        """Return the changes of a projection."""
        return Site(self._groups(site), self._records[:, site], self._widths(site))

    def reduced(self, site: int, x: torch.Tensor, norm: torch.Tensor | None = None) -> Reduced:
        """Compute u of rows.

        Args:
            site: the projection.
            x: `[T, K]`, its input.
            norm: `[K]`, weight of a zero-centred RMS norm whose factor of each row is left to the
                reader, as in `few_rows`; None: no norm.
        """
        return _reduced(x.device, x, norm, self.at(site))

    def multiplied(
        self, weight: Linear, x: torch.Tensor, after: Epilogue, *, deterministic: bool
    ) -> torch.Tensor:
        """Compute a call of a projection of one format, with checked arguments."""
        after = after._replace(overwrite=False)  # Rows with an adapter need `plus` once more.
        change = self.reduced(weight.site, x)
        out, sums = self._base(weight, x, after, deterministic, change.site.groups)
        _extended(x.device, out, sums, change)
        return out

    def _base(
        self, weight: Linear, x: torch.Tensor, after: Epilogue, deterministic: bool, groups: Groups
    ) -> tuple[torch.Tensor, Sums]:
        """Return the base's results, and the sums of the rows with adapters."""
        both = weight.with_sums(x, after, deterministic)
        if both is not None:
            return both[0], Sums(both[1], False, after)
        changed, plain = groups.changed, groups.plain
        if changed is None or plain is None:
            # A captured step serves any rows. No library promises that a product's float32 sums
            # round to the bits of its results in 16 bits, so both are computed.
            out = weight._multiply(x, after, deterministic)
            return out, Sums(weight.partial(x, deterministic=True), False, after)
        if not len(changed):
            return weight._multiply(x, after, deterministic), Sums(x[:0].float(), True, after)
        out = x.new_empty(x.shape[0], weight.columns)
        if len(plain):
            own = after.of(itemgetter(plain))
            out[plain] = weight._multiply(x[plain], own, deterministic)
        return out, Sums(weight.partial(x[changed], deterministic=True), True, after)

    def added(self, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add a projection's changes to its products in float32, in place."""
        change = self.reduced(site, x)
        _extended(x.device, out, Sums(out, False, Epilogue()), change)
