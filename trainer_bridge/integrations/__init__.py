"""Adapters for trainers of other projects. Each module imports only the needed parts of its project, at their use."""
