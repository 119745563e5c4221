"""The bodies and handlers of all endpoints, a module for each group of endpoints."""
