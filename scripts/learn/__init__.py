"""Asynchronous GRPO on a real model with verifiable tasks: a recipe to repeat and to change."""
