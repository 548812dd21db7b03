"""Pictures, videos and documents become the vision tower's input.

Its face:

loading.py           the media of a prompt
media_processors.py  the processors of a checkpoint
processors.py        their settings, and the arithmetic on pixels
raw_index.py         what earlier uploads became
decoders.py          processes that decode; `decode_worker.py` runs in them, without torch
fetch.py             bytes behind URLs
limits.py            limits that an operator sets
"""
