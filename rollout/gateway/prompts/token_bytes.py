"""The bytes of single tokens, as the vocabulary has them.

A token that is decoded alone may lose bytes: a part of a character becomes U+FFFD, and some decoders drop a first
space. So the bytes are read from the tokens themselves, which vocabularies write in one of two ways:

    byte level   every byte is a printable character (GPT-2)
    pieces       text with U+2581 for a space, and <0xNN> for single bytes (SentencePiece)
"""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _byte_characters() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary: printable bytes are themselves, other bytes follow 255."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenBytes:
    """The bytes of the tokens of a transformers tokenizer, by id. An id without a token has none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._added = {token: str(each.content) for token, each in tokenizer.added_tokens_decoder.items()}
        kinds = _decoders(tokenizer)
        self._level = _byte_characters() if "ByteLevel" in kinds else None
        self._pieces = self._level is None and bool(kinds & {"ByteFallback", "Metaspace"})

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._level is not None and all(character in self._level for character in token):
            return bytes(self._level[character] for character in token)
        if self._pieces:
            byte = _BYTE.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)).encode()


def _decoders(tokenizer: Any) -> set[str]:
    """The kinds of a tokenizer's decoders."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else backend.decoder
    waiting, kinds = [None if decoder is None else json.loads(decoder.__getstate__())], set()
    while waiting:
        each = waiting.pop()
        if each is not None:
            kinds.add(each["type"])
            waiting += each.get("decoders", ())
    return kinds
