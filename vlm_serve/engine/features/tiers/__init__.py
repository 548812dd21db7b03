"""Lower cache tiers, as the engine uses them. `loading.py` is the face."""
