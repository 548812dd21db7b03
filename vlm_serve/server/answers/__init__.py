"""Answers: a request running in the engine, and its text split into reasoning and tool calls."""
