"""Evaluation: compare answers with and without prefix caching (docs/evaluation.md)."""
