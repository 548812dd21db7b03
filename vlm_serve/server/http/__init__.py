"""The HTTP layer: connections, authentication, bodies and their budget, errors, streams."""
