"""Features on the hooks of the core step: a folder or file each, named in `table.py`."""
