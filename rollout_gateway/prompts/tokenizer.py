"""The tokenizer of a gateway, and the bytes of single tokens. It works on a thread of its own; the event loop goes on.

The gateway tokenizes prompts itself, so it knows their token ids before a worker does: `return_token_ids` and `echo`
show them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rollout.text.codec import TextCodec, check_chars, load_text_codec
from rollout_gateway.formats.chat_turns import ChatTurns
from rollout_gateway.formats.format_chooser import FormatChooser, Formats
from rollout_gateway.http.http_errors import HttpError, bad_request
from trainer_bridge.wire.errors import RolloutError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _byte_characters() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary: printable bytes are themselves, other bytes follow 255."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenBytes:
    """The bytes of the tokens of a transformers tokenizer, by id, as the vocabulary has them. An unknown id has none.

    A token that is decoded alone may lose bytes: a part of a character becomes U+FFFD, and some decoders drop a first
    space. So the bytes are read from the tokens themselves, which vocabularies write in one of two ways:

        byte level   every byte is a printable character (GPT-2)
        pieces       text with U+2581 for a space, and <0xNN> for single bytes (SentencePiece)
    """

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
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = None if backend is None else backend.decoder
    waiting, kinds = [None if decoder is None else json.loads(decoder.__getstate__())], set()
    while waiting:
        each = waiting.pop()
        if each is not None:
            kinds.add(each["type"])
            waiting += each.get("decoders", ())
    return kinds


_T = TypeVar("_T")
_MAX_CHARS = 8 << 20
_MAX_DECODED = 1 << 20  # tokens of one call of `decode`
_MAX_TEMPLATES = 16  # chat templates of requests that are kept


class GatewayTokenizer:
    """A tokenizer and its chat template, or neither (`codec` None): then only token ids can be used."""

    def __init__(self, codec: TextCodec | None, folder: Path | None = None) -> None:
        self._codec = codec
        self.folder = folder  # the model's folder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._turns: OrderedDict[str | None, ChatTurns] = (
            OrderedDict()
        )  # key: the request's template, None for the model's
        self._bytes = None if codec is None else TokenBytes(codec.tokenizer)

    @classmethod
    def load(cls, model: str | None) -> GatewayTokenizer:
        """The tokenizer of a folder or hub id, or of no model at all. Raises ValueError if it cannot be read."""
        if model is None:
            return cls(None)
        folder = Path(model).expanduser()
        if not folder.is_dir():
            from rollout.checkpoint_folder import resolve_folder

            folder = resolve_folder(model, None, weights=False)
        return cls(load_text_codec(folder), folder)

    @property
    def available(self) -> bool:
        return self._codec is not None

    def formats(self, tools: str, reasoning: str) -> Formats:
        """The formats of answers that the flags name. Raises ValueError for a format that cannot be used."""
        codec = self._codec
        if codec is None or not codec.has_chat_template:
            if tools in ("auto", "none") and reasoning in ("auto", "none"):
                return Formats()
            if codec is None:
                raise ValueError("--tool-parser and --reasoning-parser need a tokenizer: name one with --model")
        own = getattr(codec.tokenizer, "response_template", None)
        return FormatChooser(self.turns(None), own, codec.special_tokens).formats(tools, reasoning)

    async def encode(self, text: str, special: bool = True, name: str = "prompt") -> list[int]:
        """Token ids of a text; with `special` also the special tokens that the tokenizer adds.

        `name`: the field of the text, for errors.
        """
        codec = self.codec("prompt")
        if len(text) > _MAX_CHARS:
            raise bad_request(f"the prompt has {len(text)} characters; send at most {_MAX_CHARS}", name)
        return await self.on_thread(lambda: (codec.encode(text) if special else codec.encode_rendered(text)).tolist())

    async def decode(self, token_ids: list[int], special: bool = True) -> str:
        """Text of token ids; with `special` also the special tokens."""
        codec = self.codec("tokens")
        if len(token_ids) > _MAX_DECODED:
            raise bad_request(f"send at most {_MAX_DECODED} tokens", "tokens")
        return await self.on_thread(lambda: shown_text(codec, token_ids) if special else codec.decode(token_ids))

    def turns(self, template: str | None) -> ChatTurns:
        """The turns of the model's chat template, or of a request's. Called on the thread, or at the start."""
        found = self._turns.get(template)
        if found is None:
            codec = self.codec("messages")

            def render(messages: list[dict[str, Any]], tools: Any, options: Mapping[str, Any]) -> str:
                text = codec.render_chat(messages, None if tools is None else list(tools), dict(options), template)
                check_chars(text, _MAX_CHARS, "messages")
                return text

            found = self._turns[template] = ChatTurns(render, list(codec.special_tokens))
            if len(self._turns) > _MAX_TEMPLATES:
                self._turns.popitem(last=False)
        self._turns.move_to_end(template)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; for a special token the bytes of its text, without a tokenizer of `token_id:N`."""
        return f"token_id:{token_id}".encode() if self._bytes is None else self._bytes[token_id]

    def codec(self, field: str) -> TextCodec:
        """The tokenizer. Raises `HttpError` without one; `field` is the field that needs it."""
        if self._codec is None:
            raise bad_request(
                "this gateway has no tokenizer: send token ids, or start it with --model FOLDER", field or None
            )
        return self._codec

    async def on_thread(self, call: Callable[[], _T]) -> _T:
        """The result of a call that may take long. Raises `HttpError` for a `RolloutError`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except RolloutError as error:
            raise HttpError(400, str(error), error.field) from error

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def shown_text(codec: TextCodec, token_ids: Sequence[int]) -> str:
    """The text of tokens with special ones."""
    return str(codec.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
