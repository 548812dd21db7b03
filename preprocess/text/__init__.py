"""Conversations become text by a chat template, and text becomes token ids.

Its face:

tokenizer.py       text to token ids and back
family.py          conventions that tokenizer and template of a model family share
template.py        the chat template, with what it accepts
rendering.py       a conversation as the template's text
known_turns.py     what a template wrote before
known_pieces.py    what a tokenizer encoded before, cut at `seams.py`
pooled_prompts.py  conversations for embeddings and reranking
"""
