"""Constraints made ready for one model's tokenizer, by xgrammar.

Compiling is C++ that does not hold Python's lock; it takes from a millisecond to some seconds for a vocabulary of 150k
tokens. What was compiled is kept, the most recently used first, up to `_CACHE_BYTES`.
"""

from __future__ import annotations

import importlib.util
import re
from collections import OrderedDict
from typing import Any

import torch

from rollout.constraints import regex_check, schema_check, utf8
from rollout.constraints.matcher import AllowList, Constraint, GrammarConstraint, mask_of, mask_words
from rollout.constraints.spec import ConstraintSpec, choices_grammar
from rollout.deadline_thread import DeadlineThread

_CACHE_BYTES = 256 << 20
_WHITESPACE = 64  # characters between two parts of JSON: without a bound a model may write nothing else for ever
_MOST_LEFT_BEHIND = 4  # compilations that hang, each with a thread; then there are no more constraints


class ConstraintError(ValueError):
    """A constraint that cannot be used; the message says why."""


def available() -> bool:
    """True if grammars can be compiled here: the `constraints` extra is installed."""
    return importlib.util.find_spec("xgrammar") is not None


def allow_list(spec: ConstraintSpec, stop_ids: tuple[int, ...], prior: list[int], vocab: int) -> Constraint:
    """The constraint of kind `token_ids`, stop tokens allowed too. Raises ConstraintError when `prior` breaks it."""
    allowed = AllowList((*(token for token in spec.source if isinstance(token, int)), *stop_ids), vocab)
    for place, token in enumerate(prior):
        if not allowed.accept(token):
            raise ConstraintError(f"the constraint does not allow token {place} of those to continue from")
    return allowed


class ConstraintCompiler:
    """Compiles for one tokenizer. For one thread; a compilation that hangs is left behind.

    Args:
        tokenizer: a transformers tokenizer.
        vocab: tokens of the model's output, which may be more than the tokenizer has.
        compile_s: seconds that a compilation may take.
    """

    def __init__(self, tokenizer: Any, vocab: int, compile_s: float) -> None:
        import xgrammar

        self._compile_s = compile_s
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._new_matcher = xgrammar.GrammarMatcher
        self._vocab = vocab
        texts = info.decoded_vocab
        self._text_W = ~mask_of([*_not_text(tokenizer, vocab), *utf8.broken(texts)], vocab)
        self._json_W = self._text_W & ~mask_of(_never_in_json(texts), vocab)
        self._after = {token: ~mask_of(tokens, vocab) for token, tokens in utf8.breaks(texts).items()}
        self._thread = DeadlineThread("grammar-compiler")
        self._compiled: OrderedDict[ConstraintSpec, Any] = OrderedDict()
        self._bytes = 0

    def compile(self, spec: ConstraintSpec, stop_ids: tuple[int, ...], prior: list[int]) -> Constraint:
        """A constraint whose completions end with one of `stop_ids` (at least one), and begin with `prior`.

        Raises ConstraintError.
        """
        if not stop_ids:
            raise ConstraintError("a constrained completion ends with a stop token; give one, or allow eos")
        if self._thread.left_behind >= _MOST_LEFT_BEHIND:
            raise ConstraintError("too many constraints have hung this worker's compiler; send it to another one")
        known = self._compiled.get(spec)
        try:
            grammar, matcher = self._thread.call(lambda: self._start(spec, known, stop_ids, prior), self._compile_s)
        except TimeoutError:
            raise ConstraintError(f"it was not compiled within {self._compile_s:g} s; make it simpler") from None
        self._keep(spec, grammar)
        return self._constraint(matcher, spec, stop_ids, prior)

    def _start(self, spec: ConstraintSpec, grammar: Any, stop_ids: tuple[int, ...], prior: list[int]) -> Any:
        """The grammar and a matcher after `prior`. It may be left behind, so it changes nothing here."""
        if grammar is None:
            grammar = self._checked(spec, stop_ids)
        matcher = self._new_matcher(grammar, override_stop_tokens=list(stop_ids))
        for place, token in enumerate(prior):
            if not matcher.accept_token(token):
                raise ConstraintError(f"the constraint does not allow token {place} of those to continue from")
        if matcher.is_terminated():
            raise ConstraintError("the tokens to continue from end with a stop token: there is nothing to add")
        return grammar, matcher

    def _checked(self, spec: ConstraintSpec, stop_ids: tuple[int, ...]) -> Any:
        """The grammar, by which there is some first token."""
        try:
            grammar = self._compile(spec)
        except UnicodeEncodeError:
            raise ConstraintError("it has half of a surrogate pair, which is no character; leave it out") from None
        except RuntimeError as error:  # what xgrammar raises for anything that it cannot compile
            raise ConstraintError(_reason(error, spec.kind)) from error
        first = self._constraint(self._new_matcher(grammar, override_stop_tokens=list(stop_ids)), spec, stop_ids, [])
        masks_RW = torch.zeros(1, mask_words(self._vocab), dtype=torch.int32)
        first.start().fill(masks_RW, 0)
        if not masks_RW.any():
            raise ConstraintError("no text obeys it, or none that this model's tokens can begin; make it hold for one")
        return grammar

    def _constraint(
        self, matcher: Any, spec: ConstraintSpec, stop_ids: tuple[int, ...], prior: list[int]
    ) -> Constraint:
        text_W = self._json_W if spec.kind == "json_schema" else self._text_W
        return GrammarConstraint(matcher, text_W | mask_of(stop_ids, self._vocab), self._after, prior[-1:])

    def _keep(self, spec: ConstraintSpec, grammar: Any) -> None:
        if spec not in self._compiled:
            self._compiled[spec] = grammar
            self._bytes += grammar.memory_size_bytes
        self._compiled.move_to_end(spec)
        while self._bytes > _CACHE_BYTES and len(self._compiled) > 1:
            _, oldest = self._compiled.popitem(last=False)
            self._bytes -= oldest.memory_size_bytes

    def _compile(self, spec: ConstraintSpec) -> Any:
        source: Any = spec.source
        match spec.kind:
            case "json_schema":
                if (problem := schema_check.refused(source)) is not None:
                    raise ConstraintError(problem)
                return self._compiler.compile_json_schema(source, max_whitespace_cnt=_WHITESPACE)
            case "regex":
                if (problem := regex_check.refused(source)) is not None:
                    raise ConstraintError(problem)
                return self._compiler.compile_regex(source)
            case "grammar":
                if (problem := regex_check.refused_grammar(source)) is not None:
                    raise ConstraintError(problem)
                return self._compiler.compile_grammar(source)
            case _:
                return self._compiler.compile_grammar(choices_grammar(source))


def _not_text(tokenizer: Any, vocab: int) -> list[int]:
    """Special tokens: the text of a completion leaves them out, so their names must not pass for it."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return [token for token in special | set(tokenizer.all_special_ids) if token < vocab]


def _never_in_json(texts: list[bytes]) -> list[int]:
    """Tokens that JSON does not need: with control characters other than line breaks.

    Strings may not hold them, and xgrammar lets them into strings of a bounded length (seen with 0.2.8).
    """
    unwanted = bytes(code for code in range(32) if code not in b"\r\n")
    return [token for token, text in enumerate(texts) if len(text.translate(None, unwanted)) < len(text)]


def _reason(error: RuntimeError, kind: str) -> str:
    """The message of xgrammar without times, places in its source, and places in a grammar that it made itself."""
    said = re.sub(r"\[\d\d:\d\d:\d\d\] \S+: ", "", str(error)).strip()[:500]
    if kind != "grammar":
        said = re.sub(r"EBNF (?:lexer|parser) error at line \d+, column \d+: ", "", said)
    return said or "the compiler does not take it, and does not say why"
