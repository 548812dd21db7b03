"""LoRA adapters of an engine.

options.py  the adapters that options name, and where they cannot be served
store.py    adapters by name, with their users
slots.py    which of them the executor holds
table.py    where captured steps find those of slots
counts.py   counts of their requests
"""
