"""A tokenizer without a vocabulary file."""

from __future__ import annotations


class Letters:
    """A tokenizer for tokens that stand for one letter each."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id % 26])

    def is_special(self, token_id: int) -> bool:
        return False
