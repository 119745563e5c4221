"""The workers of a gateway: requests to them, and the state of each."""
