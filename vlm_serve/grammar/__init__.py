"""Answers of a given form: grammars compiled in a process of their own, followed token by token."""
