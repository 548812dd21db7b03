"""Routes under /v1/cache: its contents, its events and pins."""
