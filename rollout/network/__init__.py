"""The sockets of a worker: which clients may connect, and whether ports are free."""
