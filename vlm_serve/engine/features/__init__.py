"""What hangs on the hooks of the core step: a folder or file per feature, named in `table.py`."""
