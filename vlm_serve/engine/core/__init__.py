"""The core step: plan, run, commit. It decides, touches no tensor, and imports no feature.

`scheduler.py` is its face, and `loop.py` the thread that calls it; `hooks.py` has the moments at
which features are called.
"""
