"""Typed questions about one input: a prompt for each, read as the probabilities of its labels.

Its face:

asking.py   `Asked`, a question with its prompts, and `Answer`
prompt.py   what a prompt says behind the input
labels.py   the labels of a question, and which tokens tell them apart
"""
