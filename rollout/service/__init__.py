"""The service: from messages on a ZeroMQ socket to the engine's commands, and from its events to messages."""
