"""Drafted tokens: where they come from, and how many of them are worth a step's time."""
