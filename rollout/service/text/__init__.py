"""Text in the service: the process that tokenizes, and stop strings."""
