"""Text in and text out: the model's own tokenizer and chat template, from its folder.

Nothing of the folder is executed: tokenizers are data, templates run in transformers' jinja sandbox, and a tokenizer
that needs code of its own is refused. A folder without a tokenizer is fine: `load_text_codec` gives None, and the
worker serves token ids only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollout.service.errors import ServiceError, bad_request
from trainer_bridge.wire.codec import REPLY_LIMITS, decode

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_TEMPLATE_OPTIONS = {"add_generation_prompt", "continue_final_message", "documents"}


def load_text_codec(folder: str | Path) -> TextCodec | None:
    """The tokenizer of a model's folder; None if it has none. Raises ValueError for one that cannot be read."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return TextCodec(folder)


class TextCodec:
    """Encodes prompts and decodes completions. Encoding and decoding may run in two threads at once."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        # It checks little and fails in many ways; whatever it raises is about these files.
        except Exception as error:
            reason = f"{type(error).__name__}: {error!s:.500}"
            raise ValueError(f"cannot read the tokenizer in {folder}: {reason}") from error
        self._tokenizer: Any = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
        named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        self._reserved = named - _TEMPLATE_OPTIONS
        self._special = _special_tokens(tokenizer)

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        """True if `render_chat` can work."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text prompt, int32 [n], with the special tokens that the tokenizer adds by itself."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> np.ndarray:
        """Token ids of messages, int32 [n], through the chat template.

        `options` reach the template; `add_generation_prompt` is true unless they say otherwise or ask for
        `continue_final_message`. Raises `ServiceError` (`bad_request`) when the template does not take the messages.
        """
        return self.encode_rendered(self.render_chat(messages, tools, options))

    def encode_rendered(self, text: str) -> np.ndarray:
        """Token ids of what `render_chat` made, int32 [n]; a template writes the special tokens itself."""
        return self._encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> str:
        """The text of messages; see `encode_chat`."""
        if not self.has_chat_template:
            raise bad_request("this model has no chat template; send a 'prompt' instead", "messages")
        options = dict(options or {})
        for name in options:
            if name in self._reserved:
                raise bad_request("this is not an option of a template; leave it out", f"chat_template_kwargs.{name}")
        options.setdefault("add_generation_prompt", not options.get("continue_final_message", False))
        try:
            text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        # A template is a program over what the client sent; whatever it raises is about that.
        except Exception as error:
            raise bad_request(
                f"the chat template does not take these messages ({type(error).__name__}: {error!s:.500}); change them",
                "messages",
            ) from error
        return text

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, without special tokens, and with U+FFFD where bytes are no character."""
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=True)
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def check_stop_strings(self, strings: Sequence[str]) -> None:
        """Raise `ServiceError` for a stop string that never occurs, because text does not show special tokens."""
        for i, string in enumerate(strings):
            for token, token_id in self._special.items():
                if token in string:
                    raise bad_request(
                        f"text does not show the special token {token!r}; put its id, {token_id}, in 'stop.token_ids'",
                        f"stop.strings.{i}",
                    )

    def _encode(self, text: str, *, add_special_tokens: bool) -> np.ndarray:
        encoded = self._tokenizer(
            text, add_special_tokens=add_special_tokens, verbose=False, return_attention_mask=False
        )
        return np.array(encoded["input_ids"], dtype=np.int32)


class PromptSource(Protocol):
    """Works out token ids of prompts: `PromptEncoder`, or a process that has one."""

    def encode_prompt(self, frames: Sequence[bytes]) -> np.ndarray:
        """As `PromptEncoder.encode_prompt`. It may take long, and is called by one thread."""


class PromptEncoder:
    """The token ids of prompts as they come in `generate` messages, worked out right here."""

    def __init__(self, text: TextCodec, max_chars: int) -> None:
        self._text = text
        self._max_chars = max_chars

    def encode_prompt(self, frames: Sequence[bytes | bytearray]) -> np.ndarray:
        """Token ids, int32 [n], of the text or the chat in a message that was checked before.

        Raises `ServiceError`: the template does not take the chat, or makes more than `max_chars` of it.
        """
        header = decode(frames, REPLY_LIMITS)
        if header.get("messages") is None:
            return self._text.encode(header["prompt"])
        text = self._text.render_chat(header["messages"], header.get("tools"), header.get("chat_template_kwargs"))
        check_chars(text, self._max_chars, "messages")
        return self._text.encode_rendered(text)


def check_chars(text: str, max_chars: int, field: str) -> None:
    """Raise `ServiceError` for a long text: tokenizing takes time for every character, whatever comes of it."""
    if len(text) > max_chars:
        raise ServiceError("too_long", f"the prompt has {len(text)} characters; send at most {max_chars}", field)


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """What `decode` leaves out: text of a special token to its id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token.content: token_id for token_id, token in added.items() if token.special and token.content}
    special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return special
