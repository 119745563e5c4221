"""Errors of loading a model."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or used; the message names every file or tensor that is at fault."""
