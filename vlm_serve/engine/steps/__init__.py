"""Computes the steps that the core plans: batches, captured steps, sampling, pools. It decides
nothing.

`local_executor.py` is its face, `ranks/` the same over several processes.
"""
