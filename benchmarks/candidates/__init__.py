"""Kernels that are right in the interpreter, but not yet proven on a GPU: none of them serves."""
