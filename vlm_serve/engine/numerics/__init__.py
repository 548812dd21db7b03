"""Which arithmetic an engine computes with, under which name, and how far its bits reach."""
