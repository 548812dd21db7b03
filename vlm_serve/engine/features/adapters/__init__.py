"""LoRA adapters of an engine.

options.py  the adapters that options name, and their limits
store.py    adapters by name, with their users
slots.py    those in the executor
waiting.py  has sequences wait for a slot
"""
