"""States at the ends of answers, for next turns. `endings.py` is the face."""
