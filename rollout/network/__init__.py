"""What the sockets of a worker have in common: who may connect, and whether their ports are free."""
