"""Conversations become text by a chat template, and text becomes token ids.

Its face:

tokenizer.py       text to token ids and back
family.py          conventions that tokenizer and template of a model family share
template.py        the chat template, with what it accepts, within `sandbox.py`
rendering.py       a conversation as the template's text
pooled_prompts.py  conversations for embeddings and reranking.

What was said before:

known_turns.py     what a template wrote for a message
known_pieces.py    what a tokenizer encoded, cut at `seams.py`.
"""
