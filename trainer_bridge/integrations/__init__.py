"""Adapters for trainers of other projects. Each imports only what it needs of its project, when it is used."""
