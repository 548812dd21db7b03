"""A model over several ranks, one process each, of which the engine's own is the first.

task.py      what a rank is told to load, and how it does
wire.py      messages between the engine and a rank
process.py   a rank's process, seen from the engine
worker.py    what runs in it
executor.py  an `Executor` over all of them
transfer.py  blocks and rows of all of them, for the tiers
"""
