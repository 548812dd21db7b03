"""Peaks of a GPU, and the time that an op is predicted to take on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Peaks of the device: bytes per second, dense bfloat16 FLOPs per second."""

    name: str
    bandwidth: float
    flops: float


COPIES, PRODUCTS = 0.88, 0.8
"""Shares of the peaks that a large copy and a large product reach."""


@dataclass(frozen=True)
class Work:
    """What an op has to do, from which its time is predicted before it is measured.

    Attributes:
        operands: bytes of its operands and results, each once.
        scratch: bytes written and read again between its kernels.
        flops: of its products.
        share: of the products' rate that their tile can reach.
        chain: seconds of a chain of steps that no other work hides: launches, dependent loads,
            tokens in their order.
    """

    operands: float = 0
    scratch: float = 0
    flops: float = 0
    share: float = 1
    chain: float = 0

    def limit(self, device: Device) -> float:
        """Return the seconds that a device's peaks allow."""
        return max(self.operands / device.bandwidth, self.flops / device.flops)

    def predicted(self, device: Device) -> float:
        """Return the seconds expected of this implementation."""
        copies = (self.operands + self.scratch) / (COPIES * device.bandwidth)
        products = self.flops / (PRODUCTS * self.share * device.flops)
        return max(copies, products) + self.chain
