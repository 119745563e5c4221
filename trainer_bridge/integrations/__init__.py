"""Adapters for trainers of other projects. Each imports no more of its project than it must, and only when used."""
