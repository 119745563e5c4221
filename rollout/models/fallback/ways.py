"""The ways of running a module of transformers over the paged cache, from the fastest to the most general.

A module gets the first way in which its log-probs equal its own eager forward's (`start`).

    packed     all tokens of a step side by side, [1, T], without a cache of transformers
    together   a prompt's piece alone, [1, N]; the decoded tokens of all rows together, [B, 1]; with a cache (`cache`)
    alone      each row alone, with a cache

    paged      its layers call our attention, which reads pages; windows are known
    gathered   its layers compute attention themselves, with keys and values gathered from pages, under its own masks
"""

from typing import Literal, NamedTuple


class Way(NamedTuple):
    """A way in which a step's tokens go through a module, and its layers reach keys and values."""

    rows: Literal["packed", "together", "alone"]
    attention: Literal["paged", "gathered"]
    by_token: bool = False  # a prompt's later pieces go through token by token

    def __str__(self) -> str:
        """Words for the log and the docs."""
        words = f"{self.attention}, rows {self.rows}"
        return f"{words}, later pieces of prompts by token" if self.by_token else words


WAYS = (
    Way("packed", "paged"),
    Way("together", "paged"),
    Way("together", "paged", by_token=True),
    Way("together", "gathered"),
    Way("together", "gathered", by_token=True),
    Way("alone", "gathered"),
    Way("alone", "gathered", by_token=True),
)
