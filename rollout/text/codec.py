"""The tokenizer and the chat template of a model's folder.

No code of the folder is executed: tokenizers are data, templates run in transformers' jinja sandbox, and a tokenizer
with code of its own is refused. For a folder without a tokenizer `load_text_codec` returns None; the worker then serves
token ids only.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainer_bridge.wire.codec import REPLY_LIMITS, decode
from trainer_bridge.wire.errors import BadRequest, TooLong

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
    """The tokenizer of a model's folder, or None without one. Raises ValueError if it cannot be read."""
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
        # transformers raises errors of many types for broken files.
        except Exception as error:
            reason = f"{type(error).__name__}: {error!s:.500}"
            raise ValueError(f"cannot read the tokenizer in {folder}: {reason}; repair or remove its files") from error
        self._tokenizer: Any = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
        named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        self._reserved = (
            named | {"self", "messages"}
        ) - _TEMPLATE_OPTIONS  # transformers gives a template the messages
        self._special = _special_tokens(tokenizer)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens, which `decode` leaves out, by their text."""
        return self._special

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer has a chat template, which `render_chat` needs."""
        return bool(self._tokenizer.chat_template)

    @property
    def eos_id(self) -> int | None:
        """The token that the tokenizer declares as the end of a text; None if it declares none."""
        return self._tokenizer.eos_token_id

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text prompt, int32 [n], with the special tokens that the tokenizer adds."""
        return self._encode(text, add_special_tokens=True)

    def encode_rendered(self, text: str) -> np.ndarray:
        """Token ids of rendered messages, int32 [n]. The template has written the special tokens."""
        return self._encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
        template: str | None = None,
    ) -> str:
        """The text of messages, rendered by the chat template.

        `options` are passed to the template. `add_generation_prompt` defaults to true, or to false with
        `continue_final_message`. Raises `RolloutError` (`bad_request`) if the template refuses the messages. `template`
        replaces the model's chat template. It runs in the sandbox, but may take any time: trust its source.
        """
        if not self.has_chat_template and template is None:
            raise BadRequest("this model has no chat template; send a 'prompt' instead", field="messages")
        options = dict(options or {})
        for name in options:
            if name in self._reserved:
                raise BadRequest("this option is reserved; remove it", field=f"chat_template_kwargs.{name}")
        options.setdefault("add_generation_prompt", not options.get("continue_final_message", False))
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, **options
            )
        # A template is a program that runs on the client's data; every error is about that data.
        except Exception as error:
            raise BadRequest(
                f"the chat template refuses these messages ({type(error).__name__}: {error!s:.500}); change them",
                field="messages",
            ) from error
        return text

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, without special tokens. Bytes that form no character become U+FFFD."""
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=True)
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def check_stop_strings(self, strings: Sequence[str]) -> None:
        """Raise `RolloutError` for a stop string that contains a special token: text never shows special tokens."""
        for i, string in enumerate(strings):
            for token, token_id in self._special.items():
                if token in string:
                    raise BadRequest(
                        f"text does not show the special token {token!r}; put its id, {token_id}, in 'stop.token_ids'",
                        field=f"stop.strings.{i}",
                    )

    def _encode(self, text: str, *, add_special_tokens: bool) -> np.ndarray:
        encoded = self._tokenizer(
            text, add_special_tokens=add_special_tokens, verbose=False, return_attention_mask=False
        )
        return np.array(encoded["input_ids"], dtype=np.int32)


class PromptSource(Protocol):
    """Tokenizes prompts: a `PromptEncoder`, or a process with one."""

    def encode_prompt(self, frames: Sequence[bytes]) -> np.ndarray:
        """See `PromptEncoder.encode_prompt`. It may take seconds. Called by one thread."""


class PromptEncoder:
    """Tokenizes the prompts of `generate` messages in this process."""

    def __init__(self, text: TextCodec, max_chars: int) -> None:
        self._text = text
        self._max_chars = max_chars

    def encode_prompt(self, frames: Sequence[bytes | bytearray]) -> np.ndarray:
        """Token ids, int32 [n], of the prompt or the messages in a checked `generate` message.

        Raises `RolloutError` if the template refuses the messages, or if the text has more than `max_chars` characters.
        """
        header = decode(frames, REPLY_LIMITS)
        if header.get("fork") is not None:  # a fork is no beginning: the text names its special tokens itself
            return self._text.encode_rendered(header["prompt"])
        if header.get("messages") is None:
            return self._text.encode(header["prompt"])
        text = self._text.render_chat(header["messages"], header.get("tools"), header.get("chat_template_kwargs"))
        check_chars(text, self._max_chars, "messages")
        return self._text.encode_rendered(text)


def check_chars(text: str, max_chars: int, field: str) -> None:
    """Raise `RolloutError` for a text that is too long. The time to tokenize grows with the number of characters."""
    if len(text) > max_chars:
        raise TooLong(f"the prompt has {len(text)} characters; send at most {max_chars}", field=field)


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that `decode` leaves out: ids by text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token.content: token_id for token_id, token in added.items() if token.special and token.content}
    special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return special
