"""Files of clients: /v1/files."""
