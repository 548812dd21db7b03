"""The types of tensors in GGUF files: numbers, and blocks of codes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type: so many values take so many bytes. A number is a block of one value."""

    name: str
    values: int
    nbytes: int

    @property
    def quantised(self) -> bool:
        """Return True if a block holds several values."""
        return self.values > 1


F32, F16, BF16 = BlockType("F32", 1, 4), BlockType("F16", 1, 2), BlockType("BF16", 1, 2)

SUPPORTED = {
    0: F32,
    1: F16,
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BF16,
    39: BlockType("MXFP4", 32, 17),
}
"""By their numbers in files."""
BY_NAME = {each.name: each for each in SUPPORTED.values()}

UNSUPPORTED = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
    42: "Q2_0",
}
"""Names of the others, for messages."""
