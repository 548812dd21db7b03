"""Answers: a request running in the engine, and its text split into reasoning and tool calls.

`generation` submits a prompt and yields deltas. `output_parser` splits their text, with a reader of
calls for each form.
"""
