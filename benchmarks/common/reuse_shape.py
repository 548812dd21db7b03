"""Sizes of the benchmark of reuse: a model of 4B with seats for eight requests."""

SEATS = 8
STEP_TOKENS = 2048
BLOCK_SIZE = 64
# 64 tokens of eight layers' keys and values, and 24 layers' states.
BLOCK_BYTES, STATE_BYTES = 2_097_152, 51_511_296
