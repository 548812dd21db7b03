"""Structured outputs: grammars are compiled in a separate process and matched token by token."""
