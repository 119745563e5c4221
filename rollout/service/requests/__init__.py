"""Requests: the schema of messages, and what a request needs before the engine takes it."""
