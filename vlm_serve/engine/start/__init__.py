"""Starts an engine: checkpoint, arithmetic, memory, checks of kernels. `build.py` is its face."""
