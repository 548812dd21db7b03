"""The engine: continuous batching over a prefix cache, in one thread.

`engine.py` is its face; `described.py` says what it has decided. Rooms import downwards:

- `start/`: loads a checkpoint, measures, and builds the parts
- `features/`: what hangs on the core's hooks, and the table of it
- `steps/`: computes the steps that the core plans
- `core/`: plans steps and commits them
- `requests/`: requests and answers, and what core and executors tell each other
- `numerics/`: which arithmetic an engine computes with, and how far its bits reach
"""
