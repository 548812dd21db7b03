"""The HTTP APIs: a module or folder per API, and the folder of what several APIs share.

An API declares its request body and parses it for the engine, turns the engine's deltas into a
response, and connects the two in its route. Large APIs have the body in `request` and the rest in
`route`.
"""
