"""A model over several ranks, one process each. The first rank is the engine's own process.

- `task.py`: load task of a rank, as data
- `process.py`: a rank's process, seen from the engine, and the messages between both
- `worker.py`: main loop of a rank's process
- `executor.py`: an `Executor` over all ranks, and their blocks and rows for the tiers
"""
