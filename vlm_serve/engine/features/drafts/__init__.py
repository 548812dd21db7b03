"""Drafts: their sources, and how many of them are worth the time."""
