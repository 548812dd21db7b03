"""Requests, their sequences and answers, and the messages between the core and executors.

`request.py`, `sequence.py`, `plan.py` and `outputs.py` are what others use.
"""
