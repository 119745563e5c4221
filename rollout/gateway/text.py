"""The tokenizer of a gateway. Prompts are rendered and tokenized on a thread of their own; the event loop goes on.

The token ids of a prompt are thus known before it is sent, and so is what `return_token_ids` and `echo` show. Text of
completions comes from the worker, except where special tokens are to be seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rollout.gateway.errors import HttpError, bad_request
from rollout.gateway.sampling import SamplingBody
from rollout.service.errors import ServiceError
from rollout.service.text.codec import TextCodec, check_chars, load_text_codec
from rollout.service.text.detokenizer import Detokenizer
from trainer_bridge.client.results import Completion

_T = TypeVar("_T")
_MAX_CHARS = 8 << 20
_MAX_DECODED = 1 << 20  # tokens of one call of `decode`


class Text:
    """A tokenizer and its chat template, or neither (`codec` None): then only token ids can be used."""

    def __init__(self, codec: TextCodec | None, folder: Path | None = None) -> None:
        self._codec = codec
        self.folder = folder  # of the model
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._tokens: dict[int, str] = {}

    @classmethod
    def load(cls, model: str | None) -> Text:
        """The tokenizer of a folder or hub id, or of no model at all. Raises ValueError if it cannot be read."""
        if model is None:
            return cls(None)
        folder = Path(model).expanduser()
        if not folder.is_dir():
            from rollout.models.checkpoint_folder import resolve_folder

            folder = resolve_folder(model, None, weights=False)
        return cls(load_text_codec(folder), folder)

    @property
    def there(self) -> bool:
        """True if there is a tokenizer."""
        return self._codec is not None

    @property
    def template(self) -> str:
        """The model's chat template; empty without one."""
        found = "" if self._codec is None else self._codec.tokenizer.chat_template or ""
        return found if isinstance(found, str) else "\n".join(map(str, dict(found).values()))

    async def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; with `special` also the special tokens that the tokenizer adds."""
        codec = self._need("prompt")
        if len(text) > _MAX_CHARS:
            raise bad_request(f"the prompt has {len(text)} characters; send at most {_MAX_CHARS}", "prompt")
        return await self._on_thread(lambda: (codec.encode(text) if special else codec.encode_rendered(text)).tolist())

    async def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        template: str | None = None,
    ) -> str:
        """The text that the chat template makes of messages. Raises `HttpError` if the template refuses them."""
        codec = self._need("messages")

        def render() -> str:
            text = codec.render_chat(messages, tools, options, template)
            check_chars(text, _MAX_CHARS, "messages")
            return text

        return await self._on_thread(render)

    async def end_of_turn(self, rendered: str, drawn: list[int]) -> int | None:
        """Where the text of drawn tokens ends in a rendered conversation that ends with their message.

        The template may write more after the answer than the model drew: the token that ends the turn, a line break.
        None if the end cannot be found.
        """
        end_token = self._need("messages").tokenizer.eos_token
        ended = await self.decode(drawn[-1:]) if drawn else ""
        if end_token is None:
            return None
        place = rendered.rfind(end_token)
        if place < 0:
            return None
        return place + len(end_token) if ended == end_token else place

    async def decode(self, token_ids: list[int], special: bool = True) -> str:
        """Text of token ids; with `special` also the special tokens."""
        self._need("tokens")
        if len(token_ids) > _MAX_DECODED:
            raise bad_request(f"send at most {_MAX_DECODED} tokens", "tokens")
        return await self._on_thread(lambda: self._decode(token_ids) if special else self._need("").decode(token_ids))

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included; without a tokenizer `token_id:N`."""
        text = self._tokens.get(token_id)
        if text is None:
            text = f"token_id:{token_id}" if self._codec is None else self._decode([token_id])
            self._tokens[token_id] = text
        return text

    def from_worker(self, body: SamplingBody) -> bool:
        """True if the worker writes the text of completions: always, except where special tokens are to be seen."""
        return self.there and body.skip_special_tokens

    def pieces(self, body: SamplingBody, keep_stop: bool) -> TextPieces:
        """The text of one completion in pieces: the worker's, or made here; empty without a tokenizer."""
        if self.there and not self.from_worker(body):
            return SpecialPieces(self._decode, body.stop, keep_stop)
        return TextPieces(keep_stop)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _decode(self, token_ids: list[int]) -> str:
        assert self._codec is not None
        return str(
            self._codec.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _need(self, field: str) -> TextCodec:
        if self._codec is None:
            raise bad_request(
                "this gateway has no tokenizer: send token ids, or start it with --model FOLDER", field or None
            )
        return self._codec

    async def _on_thread(self, call: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except ServiceError as error:
            raise HttpError(400, str(error), error.field) from error


class TextPieces:
    """The worker's text of one completion."""

    def __init__(self, keep_stop: bool) -> None:
        self._keep_stop = keep_stop

    def take(self, part: Completion) -> str:
        """The text that new tokens add; the last part has a finish reason."""
        text = part.text or ""
        return text + part.stop if self._keep_stop and isinstance(part.stop, str) else text


class SpecialPieces(TextPieces):
    """The text of one completion with its special tokens, without the token that ended it.

    The worker finds stop strings. As many characters as a stop string has are kept back, so that it is never shown.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: list[str], keep_stop: bool) -> None:
        super().__init__(keep_stop)
        self._detokenizer = Detokenizer(decode)
        self._reach = max(map(len, stop), default=0)
        self._kept = ""

    def take(self, part: Completion) -> str:
        """The text that new tokens add; the last part has a finish reason."""
        tokens = part.token_ids.tolist()
        if part.finish_reason == "stop" and isinstance(part.stop, int):
            tokens = tokens[:-1]
        self._kept += self._detokenizer.feed(tokens)
        if part.finish_reason is None:
            end = max(0, len(self._kept) - self._reach)
        else:
            self._kept += self._detokenizer.finish()
            end = self._kept.rfind(part.stop) if isinstance(part.stop, str) else len(self._kept)
            if end < 0:  # a special token lies in the string
                end = len(self._kept)
            elif self._keep_stop and isinstance(part.stop, str):
                end += len(part.stop)
        text, self._kept = self._kept[:end], self._kept[end:]
        return text
