"""Clients of a worker; they need zmq, msgpack and numpy only."""
