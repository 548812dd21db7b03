"""Reads request bodies of every API into conversations, in plain Python.

No tensor, tokenizer or fetch takes part: a gateway without a model reads bodies as an engine does.
"""
