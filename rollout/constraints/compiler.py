"""Compiles constraints for one model's tokenizer, with xgrammar.

The compiler is C++ and does not hold Python's lock. It takes between a millisecond and some seconds for a vocabulary of
150k tokens. Compiled grammars are cached, least recently used out first, up to a limit.

xgrammar (0.2.8) allows two kinds of tokens that must not come. One is byte sequences that are not UTF-8: after the
first byte of some characters the range of the second byte is smaller than usual, and a byte outside it would be another
way to write a shorter character, or half of a surrogate pair; the text would then contain U+FFFD. The other is control
characters in JSON strings of a bounded length. Masks exclude both.
"""

from __future__ import annotations

import importlib.util
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollout.constraints import regex_check, schema_check
from rollout.constraints.matcher import AllowList, Constraint, GrammarConstraint, mask_of, mask_words
from rollout.constraints.spec import ConstraintSpec, choices_grammar
from rollout.process.deadline_thread import DeadlineThread

CACHE_BYTES = 256 << 20
_WHITESPACE = 64  # characters between two parts of JSON: without a bound a model may write only these for ever
_MOST_HUNG = 4  # compilations that hang, each with a thread; at this number the worker refuses constraints
#: First bytes of UTF-8 characters, and the second bytes that make them invalid.
_INVALID_SECONDS: Mapping[int, range] = {0xE0: range(0x80, 0xA0), 0xED: range(0xA0, 0xC0), 0xF0: range(0x80, 0x90)}
_INVALID_UTF8 = re.compile(rb"\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]")


class ConstraintError(ValueError):
    """A constraint that cannot be used; the message gives the reason."""


def available() -> bool:
    """True if grammars can be compiled: the `constraints` extra is installed."""
    return importlib.util.find_spec("xgrammar") is not None


def allow_list(spec: ConstraintSpec, prior: list[int], vocab: int) -> Constraint:
    """The constraint of kind `token_ids`: these tokens and no others. Raises ConstraintError if `prior` breaks it."""
    allowed = AllowList(tuple(token for token in spec.source if isinstance(token, int)), vocab)
    for index, token in enumerate(prior):
        if not allowed.accept(token):
            raise ConstraintError(f"the constraint does not allow token {index} of the tokens to continue from")
    return allowed


class ConstraintCompiler:
    """Compiles for one tokenizer. For one thread; a compilation that hangs is abandoned with its thread.

    Args:
        tokenizer: a transformers tokenizer.
        vocab: size of the model's output, which may be larger than the tokenizer's vocabulary.
        compile_s: time limit of a compilation, seconds.
        cache_bytes: size limit of the compiled grammars that are kept; the last one is kept anyway.
    """

    def __init__(self, tokenizer: Any, vocab: int, compile_s: float, cache_bytes: int = CACHE_BYTES) -> None:
        import xgrammar

        self._compile_s, self._cache_bytes = compile_s, cache_bytes
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._new_matcher = xgrammar.GrammarMatcher
        self._vocab = vocab
        texts = info.decoded_vocab
        special = _not_text(tokenizer, vocab)
        # xgrammar wants a stop token; where a request has none, this one stands in for it and is never allowed.
        self._no_stop = next(iter(special), vocab - 1)
        self._text_W = ~mask_of([*special, *_invalid_utf8(texts)], vocab)
        self._json_W = self._text_W & ~mask_of(_control_characters(texts), vocab)
        self._after = {token: ~mask_of(tokens, vocab) for token, tokens in _invalid_after(texts).items()}
        self._thread = DeadlineThread("grammar-compiler")
        self._compiled: OrderedDict[ConstraintSpec, Any] = OrderedDict()
        self._bytes = 0

    def compile(self, spec: ConstraintSpec, stop_ids: tuple[int, ...], prior: list[int]) -> Constraint:
        """A constraint whose completions begin with `prior`; where their text is complete, `stop_ids` are allowed.

        Raises ConstraintError.
        """
        if self._thread.left_behind >= _MOST_HUNG:
            raise ConstraintError(
                "too many constraints have hung this worker's compiler; send this one to another worker"
            )
        known = self._compiled.get(spec)
        try:
            grammar, matcher = self._thread.call(lambda: self._start(spec, known, stop_ids, prior), self._compile_s)
        except TimeoutError:
            raise ConstraintError(f"it was not compiled within {self._compile_s:g} s; make it simpler") from None
        self._keep(spec, grammar)
        return self._constraint(matcher, spec, stop_ids, prior)

    def _start(self, spec: ConstraintSpec, grammar: Any, stop_ids: tuple[int, ...], prior: list[int]) -> Any:
        """The grammar and a matcher after `prior`. It may be abandoned, so it does not change the compiler."""
        if grammar is None:
            grammar = self._checked(spec, stop_ids)
        matcher = self._begin(grammar, stop_ids)
        for index, token in enumerate(prior):
            if not matcher.accept_token(token):
                raise ConstraintError(f"the constraint does not allow token {index} of the tokens to continue from")
        if matcher.is_terminated():
            raise ConstraintError("the tokens to continue from end with a stop token: there is nothing to add")
        return grammar, matcher

    def _checked(self, spec: ConstraintSpec, stop_ids: tuple[int, ...]) -> Any:
        """The grammar, if it allows any first token."""
        try:
            grammar = self._compile(spec)
        except UnicodeEncodeError:
            raise ConstraintError(
                "it contains half of a surrogate pair, which is not a character; leave it out"
            ) from None
        except RuntimeError as error:  # of xgrammar, for anything that it cannot compile
            raise ConstraintError(_reason(error, spec.kind)) from error
        first = self._constraint(self._begin(grammar, stop_ids), spec, stop_ids, []).start()
        masks_RW = torch.zeros(1, mask_words(self._vocab), dtype=torch.int32)
        first.fill(masks_RW, 0)
        if not (masks_RW.any() or first.complete):
            raise ConstraintError("no text obeys it, or none that this model's tokens can begin; allow some text")
        return grammar

    def _begin(self, grammar: Any, stop_ids: tuple[int, ...]) -> Any:
        return self._new_matcher(grammar, override_stop_tokens=list(stop_ids) or [self._no_stop])

    def _constraint(
        self, matcher: Any, spec: ConstraintSpec, stop_ids: tuple[int, ...], prior: list[int]
    ) -> Constraint:
        text_W = self._json_W if spec.kind == "json_schema" else self._text_W
        if stop_ids:
            text_W = text_W | mask_of(stop_ids, self._vocab)
        else:
            text_W = text_W & ~mask_of([self._no_stop], self._vocab)
        return GrammarConstraint(matcher, text_W, self._after, prior[-1:])

    def _keep(self, spec: ConstraintSpec, grammar: Any) -> None:
        if spec not in self._compiled:
            self._compiled[spec] = grammar
            self._bytes += grammar.memory_size_bytes
        self._compiled.move_to_end(spec)
        while self._bytes > self._cache_bytes and len(self._compiled) > 1:
            _, oldest = self._compiled.popitem(last=False)
            self._bytes -= oldest.memory_size_bytes

    def _compile(self, spec: ConstraintSpec) -> Any:
        source: Any = spec.source
        match spec.kind:
            case "json_schema":
                if (problem := schema_check.schema_problem(source)) is not None:
                    raise ConstraintError(problem)
                return self._compiler.compile_json_schema(source, max_whitespace_cnt=_WHITESPACE)
            case "regex":
                if (problem := regex_check.regex_problem(source)) is not None:
                    raise ConstraintError(problem)
                return self._compiler.compile_regex(source)
            case "grammar":
                if (problem := regex_check.grammar_problem(source)) is not None:
                    raise ConstraintError(problem)
                return self._compiler.compile_grammar(source)
            case _:
                return self._compiler.compile_grammar(choices_grammar(source))


def _not_text(tokenizer: Any, vocab: int) -> list[int]:
    """Special tokens: they are not part of a completion's text, so their names must not match as text."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return [token for token in special | set(tokenizer.all_special_ids) if token < vocab]


def _control_characters(texts: list[bytes]) -> list[int]:
    """Tokens with control characters other than line breaks; JSON needs none of them."""
    unwanted = bytes(code for code in range(32) if code not in b"\r\n")
    return [token for token, text in enumerate(texts) if len(text.translate(None, unwanted)) < len(text)]


def _invalid_utf8(texts: Sequence[bytes]) -> list[int]:
    """Tokens that contain bytes that are not UTF-8."""
    return [token for token, text in enumerate(texts) if _INVALID_UTF8.search(text)]


def _invalid_after(texts: Sequence[bytes]) -> dict[int, list[int]]:
    """By token that ends with the first byte of a character: the tokens that would make the character invalid."""
    begins = {
        byte: [token for token, text in enumerate(texts) if text and text[0] in seconds]
        for byte, seconds in _INVALID_SECONDS.items()
    }
    return {token: begins[text[-1]] for token, text in enumerate(texts) if text and text[-1] in begins}


def _reason(error: RuntimeError, kind: str) -> str:
    """The message of xgrammar without times, places in its source, and places in a grammar that it generated."""
    said = re.sub(r"\[\d\d:\d\d:\d\d\] \S+: ", "", str(error)).strip()[:500]
    if kind != "grammar":
        said = re.sub(r"EBNF (?:lexer|parser) error at line \d+, column \d+: ", "", said)
    return said or "the compiler refuses it and does not say why"
