"""A line for each token of a completion: position, log-prob, id, text, and the likeliest tokens at its position.

          0   -0.693     13  ' 1'    ' 1' -0.691, ' 2' -0.704

The text of a token is what its chunk added to the text of the completion: nothing while a character is not whole, or
while the worker keeps back what may become a stop string. The likeliest tokens come as ids; their texts are those of
the model's tokenizer.json, if this machine has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_bridge.client.results import Chunk

_TEXT_WIDTH = 14


class TokenLines:
    """Makes the lines."""

    def __init__(self) -> None:
        self._text_of: Callable[[int], str] | None = None

    def find_texts(self, model: str) -> None:
        """Look for the tokenizer of a model, a folder or a hub id, on this machine. Nothing is downloaded."""
        self._text_of = _texts_of(model)

    def of(self, chunk: Chunk) -> Iterator[str]:
        """A line for each token of a chunk. The last line has the text of the whole chunk."""
        part = chunk.part
        last = len(part) - 1
        if last < 0 and part.text:  # text that was kept back and is no stop string
            yield f"{'':>25}  {part.text!r}"
        for row, (token, logprob) in enumerate(zip(part.token_ids.tolist(), part.logprobs.tolist(), strict=True)):
            text = "" if part.text is None else repr(part.text if row == last else "")
            line = f"{chunk.offset + row:>7} {logprob:>9.3f} {token:>7}  {text:<{_TEXT_WIDTH}}"
            yield f"{line}  {self._likeliest(chunk, row)}".rstrip()

    def _likeliest(self, chunk: Chunk, row: int) -> str:
        ids, logprobs = chunk.part.top_ids, chunk.part.top_logprobs
        if ids is None or logprobs is None:
            return ""
        pairs = zip(ids[row].tolist(), logprobs[row].tolist(), strict=True)
        return ", ".join(f"{self._name(token)} {logprob:.3f}" for token, logprob in pairs)

    def _name(self, token: int) -> str:
        return str(token) if self._text_of is None else repr(self._text_of(token))


def _texts_of(model: str) -> Callable[[int], str] | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
        from tokenizers import Tokenizer
    except ModuleNotFoundError:  # clients are installed without them
        return None
    file = Path(model).expanduser() / "tokenizer.json"
    if not file.is_file():
        try:
            cached = try_to_load_from_cache(model, file.name)
        except HFValidationError:  # a folder on the worker's machine
            return None
        if not isinstance(cached, str):
            return None
        file = Path(cached)
    tokenizer = Tokenizer.from_file(str(file))
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)
