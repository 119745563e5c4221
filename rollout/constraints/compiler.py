"""Compiles constraints for one model's tokenizer, with xgrammar.

The compiler is C++ and does not hold Python's lock. It takes between a millisecond and some seconds for a vocabulary of
150k tokens. Compiled grammars are cached, least recently used out first, up to a limit.

xgrammar (0.2.8) allows two kinds of tokens that must not come. One is byte sequences that are not UTF-8: after the
first byte of some characters the range of the second byte is smaller than usual, and a byte outside it would be another
way to write a shorter character, or half of a surrogate pair; the text would then contain U+FFFD. The other is control
characters in JSON strings of a bounded length. Masks exclude both.
"""

import importlib.util
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout.constraints import regex_check, schema_check
from rollout.constraints.constraint_spec import ConstraintSpec, choices_grammar
from rollout.constraints.marker import AfterMarker, IdMarker, Marker, TextMarker, TokenTexts, ends_with, find
from rollout.constraints.matcher import AllowList, Constraint, GrammarConstraint, StopTokens, mask_of, mask_words
from rollout.process.deadline_thread import DeadlineThread

CACHE_BYTES = 256 << 20
_WHITESPACE = 64  # characters between two parts of JSON: without a bound a model may write only these for ever
_MOST_HUNG = 4  # compilations that hang, each with a thread; at this number the worker refuses constraints
#: First bytes of UTF-8 characters, and the second bytes that make them invalid.
_INVALID_SECONDS: Mapping[int, range] = {0xE0: range(0x80, 0xA0), 0xED: range(0xA0, 0xC0), 0xF0: range(0x80, 0x90)}
_INVALID_UTF8 = re.compile(rb"\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]")


class ConstraintError(ValueError):
    """A constraint that cannot be used; the message gives the reason, `field` the field if it is not the source."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A cached constraint: a compiled grammar, and the marker after which it begins."""

    grammar: Any
    marker: Marker | None

    @property
    def nbytes(self) -> int:
        """Approximate memory, bytes."""
        return self.grammar.memory_size_bytes + (0 if self.marker is None else self.marker.nbytes)


def available() -> bool:
    """True if grammars can be compiled: xgrammar is installed."""
    return importlib.util.find_spec("xgrammar") is not None


def allow_list(
    spec: ConstraintSpec,
    stop_ids: tuple[int, ...],
    prior: list[int],
    vocab: int,
    prompt: Sequence[int] = (),
    texts: TokenTexts | None = None,
) -> Constraint:
    """The constraint of kind `token_ids`: these tokens and no others; arguments as for `ConstraintCompiler.compile`.

    Without `texts` a marker cannot be a text. Raises ConstraintError, also if `prior` breaks it.
    """
    allowed = AllowList(tuple(token for token in spec.source if isinstance(token, int)), vocab)
    marker = _marker(spec.after, texts, lambda rest: False, vocab)
    begin = _begin_of(spec, marker, stop_ids, prior, prompt, texts)
    if begin is None:
        assert marker is not None
        return AfterMarker(allowed, marker, tuple(prior[-marker.reach :]))
    count, rest = begin
    for index, token in enumerate(prior[count:], count):
        if not allowed.accept(token):
            raise _not_allowed(index)
    if rest:
        raise _not_allowed(count - 1)
    return allowed


class ConstraintCompiler:
    """Compiles for one tokenizer. For one thread; a compilation that hangs is abandoned with its thread.

    Args:
        tokenizer: a transformers tokenizer.
        vocab: size of the model's output, which may be larger than the tokenizer's vocabulary.
        compile_s: time limit of a compilation, seconds.
        eos_ids: tokens of the model that are never text, even if the tokenizer has a text for them.
        cache_bytes: size limit of the kept compiled grammars; the last grammar is kept anyway.
    """

    def __init__(
        self, tokenizer: Any, vocab: int, compile_s: float, eos_ids: Sequence[int] = (), cache_bytes: int = CACHE_BYTES
    ) -> None:
        import xgrammar

        self._compile_s, self._cache_bytes = compile_s, cache_bytes
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._grammars = xgrammar.Grammar
        self._new_matcher = xgrammar.GrammarMatcher
        self._vocab = vocab
        texts = info.decoded_vocab
        self.texts = TokenTexts(texts)
        special = _not_text(tokenizer, vocab)
        no_text = {*special, *eos_ids, *(token for token, text in enumerate(texts) if not text)}
        # xgrammar wants a stop token, and its releases differ in what that may be. So it gets a stop token that never
        # comes, and `GrammarMatcher` allows the request's stop tokens.
        self._no_stop = next(iter(special), min(no_text, default=vocab - 1))
        self._no_text = frozenset({*no_text, self._no_stop})
        self._text_W = ~mask_of([*self._no_text, *_invalid_utf8(texts)], vocab)
        self._json_W = self._text_W & ~mask_of(_control_characters(texts), vocab)
        self._after = {token: ~mask_of(tokens, vocab) for token, tokens in _invalid_after(texts).items()}
        self._thread = DeadlineThread("grammar-compiler")
        self._compiled: OrderedDict[ConstraintSpec, _Compiled] = OrderedDict()
        self._bytes = 0

    def compile(
        self, spec: ConstraintSpec, stop_ids: tuple[int, ...], prior: list[int], prompt: Sequence[int] = ()
    ) -> Constraint:
        """A constraint whose completions begin with `prior`; where their text is complete, `stop_ids` are allowed.

        After a `prompt` that ends with the marker, apart from white space, the completion has no free part.
        Raises ConstraintError.
        """
        if self._thread.left_behind >= _MOST_HUNG:
            raise ConstraintError(
                "too many constraints have hung this worker's compiler; send this one to another worker"
            )
        known = self._compiled.get(spec)
        try:
            compiled, constraint = self._thread.call(
                lambda: self._start(spec, known, stop_ids, prior, prompt), self._compile_s
            )
        except TimeoutError:
            raise ConstraintError(f"it was not compiled within {self._compile_s:g} s; make it simpler") from None
        self._keep(spec, compiled)
        return constraint

    def _start(
        self,
        spec: ConstraintSpec,
        compiled: _Compiled | None,
        stop_ids: tuple[int, ...],
        prior: list[int],
        prompt: Sequence[int],
    ) -> tuple[_Compiled, Constraint]:
        """The cache entry and the constraint. The call may be abandoned, so it does not change the compiler."""
        if compiled is None:
            grammar = self._checked(spec, stop_ids)
            takes = _Takes(self._begin(grammar))
            compiled = _Compiled(grammar, _marker(spec.after, self.texts, takes, self._vocab))
        matcher = self._begin(compiled.grammar)
        begin = _begin_of(spec, compiled.marker, stop_ids, prior, prompt, self.texts)
        if begin is None:
            assert compiled.marker is not None
            inner, known = self._constraint(matcher, spec, stop_ids, []), prior[-compiled.marker.reach :]
            return compiled, AfterMarker(inner, compiled.marker, tuple(known))
        count, rest = begin
        if rest and not matcher.accept_string(rest):
            raise _not_allowed(count - 1)
        ended = False  # True after a stop token
        for index, token in enumerate(prior[count:], count):
            if token in self._no_text or not matcher.accept_token(token):
                ended = token in stop_ids and matcher.is_completed() and index == len(prior) - 1
                if not ended:
                    raise _not_allowed(index)
        if ended:
            raise ConstraintError("the tokens to continue from end with a stop token, so nothing can follow")
        return compiled, self._constraint(matcher, spec, stop_ids, prior)

    def _checked(self, spec: ConstraintSpec, stop_ids: tuple[int, ...]) -> Any:
        """The grammar. Raises ConstraintError if it allows no first token."""
        try:
            grammar = self._compile(spec)
        except UnicodeEncodeError:
            raise ConstraintError(
                "it contains half of a surrogate pair, which is not a character; leave it out"
            ) from None
        except RuntimeError as error:  # xgrammar raises it for anything that it cannot compile
            raise ConstraintError(_reason(error, spec.kind)) from error
        matcher = self._begin(grammar)
        if spec.after is not None:
            matcher.accept_string(" " * _WHITESPACE)  # the text begins after this white space at the latest
        first = self._constraint(matcher, spec, stop_ids, []).start()
        masks_RW = torch.zeros(1, mask_words(self._vocab), dtype=torch.int32)
        first.fill(masks_RW, 0)
        if not (masks_RW.any() or first.complete):
            raise ConstraintError("this model can write no text that satisfies it; relax it")
        return grammar

    def _begin(self, grammar: Any) -> Any:
        return self._new_matcher(grammar, override_stop_tokens=[self._no_stop])

    def _constraint(
        self, matcher: Any, spec: ConstraintSpec, stop_ids: tuple[int, ...], prior: list[int]
    ) -> Constraint:
        text_W = self._json_W if spec.kind == "json_schema" else self._text_W
        ends = StopTokens(frozenset(stop_ids), self._no_text, mask_of(stop_ids, self._vocab))
        return GrammarConstraint(matcher, text_W, ends, self._after, prior[-1:])

    def _keep(self, spec: ConstraintSpec, compiled: _Compiled) -> None:
        if spec not in self._compiled:
            self._compiled[spec] = compiled
            self._bytes += compiled.nbytes
        self._compiled.move_to_end(spec)
        while self._bytes > self._cache_bytes and len(self._compiled) > 1:
            _, oldest = self._compiled.popitem(last=False)
            self._bytes -= oldest.nbytes

    def _compile(self, spec: ConstraintSpec) -> Any:
        grammar = self._grammar(spec)
        if spec.after is not None:  # models write white space after a marker, which no grammar begins with
            grammar = self._grammars.concat(self._grammars.from_regex(f"[ \\t\\r\\n]{{0,{_WHITESPACE}}}"), grammar)
        return self._compiler.compile_grammar(grammar)

    def _grammar(self, spec: ConstraintSpec) -> Any:
        source: Any = spec.source
        match spec.kind:
            case "json_schema":
                if (problem := schema_check.schema_problem(source)) is not None:
                    raise ConstraintError(problem)
                return self._grammars.from_json_schema(source, max_whitespace_cnt=_WHITESPACE)
            case "regex":
                if (problem := regex_check.regex_problem(source)) is not None:
                    raise ConstraintError(problem)
                return self._grammars.from_regex(source)
            case "grammar":
                if (problem := regex_check.grammar_problem(source)) is not None:
                    raise ConstraintError(problem)
                return self._grammars.from_ebnf(source)
            case _:
                return self._grammars.from_ebnf(choices_grammar(source))


class _Takes:
    """Whether a grammar allows a text at its beginning."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher  # a matcher at the beginning of the grammar

    def __call__(self, text: bytes) -> bool:
        if not self._matcher.accept_string(text):
            return False
        self._matcher.rollback(1)
        return True


def _marker(
    after: str | tuple[int, ...] | None, texts: TokenTexts | None, takes: Callable[[bytes], bool], vocab: int
) -> Marker | None:
    """The marker that a constraint begins after; `takes` says which rests of tokens its text can begin with."""
    if after is None:
        return None
    if not isinstance(after, str):
        return IdMarker(after)
    assert texts is not None, "the request should have been refused"
    marker = TextMarker(after.encode(), texts, takes, vocab)
    if not marker.ends:
        raise ConstraintError("no token of this model ends with it; use a text that the model writes", "after")
    return marker


def _begin_of(
    spec: ConstraintSpec,
    marker: Marker | None,
    stop_ids: tuple[int, ...],
    prior: list[int],
    prompt: Sequence[int],
    texts: TokenTexts | None,
) -> tuple[int, bytes] | None:
    """The beginning of the constraint in `prior`: number of tokens before it, and the last token's rest; or None."""
    if marker is None or spec.after is None:
        return 0, b""
    own = [
        token for token in stop_ids if isinstance(spec.after, str) and texts and spec.after.encode() in texts.of[token]
    ]
    if own or (not isinstance(spec.after, str) and spec.after[-1] in stop_ids):
        raise ConstraintError("it ends with a stop token of this request, which would end the completion", "after")
    return (0, b"") if ends_with(prompt, spec.after, texts) else find(marker, prior)


def _not_allowed(index: int) -> ConstraintError:
    return ConstraintError(f"the constraint does not allow token {index} of the tokens to continue from")


def _not_text(tokenizer: Any, vocab: int) -> list[int]:
    """Special tokens are not part of a completion's text, so their names must not match as text."""
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
    """Maps each token that ends with a character's first byte to the tokens that make the character invalid."""
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
