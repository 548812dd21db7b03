"""What makes a prompt the same as another: its keys, and how requests alike begin.

Its face:

prompt.py    `Prompt`, the frozen result of preparation
keys.py      cut points, block keys and tail keys
affinity.py  digests of how a request begins, for routers without a tokenizer
"""
