"""The APIs: one folder each, and beside them what several have in common.

A folder's `request` says what a client may send and reads it into what the engine wants, `stream`
turns the engine's deltas into the answer, and `route` puts the two together.
"""
