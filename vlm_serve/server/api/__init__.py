"""The HTTP APIs: one folder per API, and the modules that several APIs share.

In each folder, `request` declares the request body and parses it for the engine. `stream` turns the
engine's deltas into a response. `route` connects the two.
"""
