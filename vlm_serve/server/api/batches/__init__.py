"""Batches of requests: /v1/batches."""
