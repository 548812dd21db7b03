"""Files and batches of clients: /v1/files and /v1/batches."""
