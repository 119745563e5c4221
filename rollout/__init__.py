"""The worker: everything between the socket and the token."""

__version__ = "0.1.0"
