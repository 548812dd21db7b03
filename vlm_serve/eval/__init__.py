"""Evaluation: the same questions asked with and without prefix caching, and every pair of answers
compared (docs/evaluation.md)."""
