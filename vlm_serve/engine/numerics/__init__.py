"""Arithmetic of an engine: what it computes with, its name, and how far its bits reach."""
