"""GGUF files: a model and its vision tower in llama.cpp's format, served like a checkpoint.

`reader.py` reads one file: header, metadata and tensor table. `blocks.py` knows its types of codes.
The contents of a checkpoint's small files follow from the metadata: `text_config.py`, `vision.py`
and `folder.py`, which writes them into a folder, with a pointer to the GGUF files.

`vision.py` and `tensors.py` turn its tensors into those of a checkpoint. `files.py` finds the parts
of a model and its tower.
"""
