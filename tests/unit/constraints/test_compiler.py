"""Compiled constraints: the tokens that they allow, and the errors for constraints that cannot be used."""

import copy
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from rollout.constraints import regex_check, schema_check
from rollout.constraints.compiler import ConstraintCompiler, ConstraintError, allow_list
from rollout.constraints.constraint_spec import ConstraintSpec
from rollout.constraints.matcher import Constraint, mask_words
from rollout.process.deadline_thread import DeadlineThread
from rollout.service.requests.constraint import constraints_for
from rollout.text.codec import TextCodec, load_text_codec
from scripts import spatial
from tests.support.patience import PATIENCE_S
from tests.support.tokenizer_folder import make_tokenizer_folder

xgrammar = pytest.importorskip("xgrammar")
OBJECT = '{"type": "object", "properties": {"k": {"const": 7}}, "required": ["k"]}'
STRING = '{"type": "string"}'
EXTRA = 11  # tokens of the model that the tokenizer lacks


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return TextCodec(make_tokenizer_folder(tmp_path_factory.mktemp("text"))).tokenizer


@pytest.fixture(scope="module")
def vocab(tokenizer) -> int:
    return len(tokenizer) + EXTRA


@pytest.fixture(scope="module")
def compiler(tokenizer, vocab) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, vocab, 200.0)


def write(constraint: Constraint, tokenizer, vocab: int, text: str) -> list[str]:
    """Accept the tokens of `text`; returns the texts of the tokens that may come after it, sorted."""
    matcher = constraint.start()
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert matcher.accept(token), f"{tokenizer.decode([token])!r} of {text!r} is not allowed"
    masks = torch.zeros(1, mask_words(vocab), dtype=torch.int32)
    matcher.fill(masks, 0)
    allowed = [token for token in range(vocab) if masks[0, token // 32] >> (token % 32) & 1]
    return sorted(tokenizer.decode([token]) for token in allowed)


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [("json_schema", OBJECT, '{"k":7}'), ("json_schema", STRING, '"aé b"'), ("regex", "a+bc?", "aab")],
)
def test_a_matcher_goes_back_to_where_it_was(compiler, tokenizer, vocab, kind, source, text):
    """From every place it goes ahead to every later one, to the stop token too, and allows the same tokens again."""
    constraint = compiler.compile(ConstraintSpec(kind, source), (tokenizer.eos_token_id,), [])
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    matcher = constraint.start()
    masks = torch.zeros(3, mask_words(vocab), dtype=torch.int32)
    for place, token in enumerate(tokens):
        matcher.fill(masks, 0)
        for far in range(1, len(tokens) - place + 1):
            for ahead in tokens[place : place + far]:
                assert matcher.accept(ahead)
                if ahead != tokens[-1]:
                    matcher.fill(masks, 2)
            matcher.undo(far)
            matcher.fill(masks, 1)
            assert torch.equal(masks[1], masks[0])
        assert matcher.accept(token)


@pytest.mark.parametrize(
    ("kind", "source", "text", "after"),
    [
        ("regex", "[ab]{2}c?", "", ["a", "b"]),
        ("regex", "[ab]{2}c?", "ab", ["<|im_end|>", "c"]),
        ("regex", "[ab]{2}c?", "abc", ["<|im_end|>"]),
        ("choices", ("yes", "no", 'a "quote"\n\\ é👍'), "y", ["e"]),
        ("choices", ("yes", "no", 'a "quote"\n\\ é👍'), 'a "quote"\n\\ é👍', ["<|im_end|>"]),
        ("grammar", 'root ::= "(" root ")" | "x"', "((x", [")"]),
        ("grammar", 'root ::= "(" root ")" | "x"', "((x))", ["<|im_end|>"]),
        ("json_schema", '{"type": "boolean"}', "tru", ["e"]),
        ("json_schema", OBJECT, '{"k": 7', [" ", "\n", "\r", "}"]),
    ],
)
def test_a_constraint_allows_its_tokens_and_no_others(compiler, tokenizer, vocab, kind, source, text, after):
    constraint = compiler.compile(ConstraintSpec(kind, source), (tokenizer.eos_token_id,), [])
    assert write(constraint, tokenizer, vocab, text) == sorted(after)


def test_each_completion_has_its_own_matcher(compiler, tokenizer, vocab):
    constraint = compiler.compile(ConstraintSpec("regex", "abc"), (tokenizer.eos_token_id,), [])
    assert write(constraint, tokenizer, vocab, "ab") == ["c"]
    assert "a" in write(constraint, tokenizer, vocab, "")


def test_a_continued_completion_starts_after_its_tokens(compiler, tokenizer, vocab):
    spec, eos = ConstraintSpec("regex", "abc"), (tokenizer.eos_token_id,)
    prior = tokenizer.encode("ab", add_special_tokens=False)
    assert write(compiler.compile(spec, eos, prior), tokenizer, vocab, "") == ["c"]
    with pytest.raises(ConstraintError, match="token 0"):
        compiler.compile(spec, eos, tokenizer.encode("b", add_special_tokens=False))
    with pytest.raises(ConstraintError, match="token 1"):
        allow_list(ConstraintSpec("token_ids", (5, 6)), eos, [5, 7], vocab)


def test_only_the_stop_tokens_of_the_request_end_a_completion(compiler, tokenizer, vocab):
    z = tokenizer.encode("z", add_special_tokens=False)[0]
    constraint = compiler.compile(ConstraintSpec("regex", "a*"), (z,), [])
    assert {"a", "z"} <= set(write(constraint, tokenizer, vocab, "aa"))
    assert "<|im_end|>" not in write(constraint, tokenizer, vocab, "aa")


def test_a_stop_token_with_a_text_may_be_text_of_a_grammar_and_may_end_it(compiler, tokenizer, vocab):
    """They do not change what a grammar allows, and where its text is complete, they may follow."""
    (c,) = tokenizer.encode("c", add_special_tokens=False)
    stops = (tokenizer.eos_token_id, c)
    constraint = compiler.compile(ConstraintSpec("regex", "abcd|abx?"), stops, [])
    assert write(constraint, tokenizer, vocab, "ab") == ["<|im_end|>", "c", "x"]
    constraint = compiler.compile(ConstraintSpec("regex", "ab(de)?"), stops, [])
    assert write(constraint, tokenizer, vocab, "ab") == ["<|im_end|>", "c", "d"]
    assert write(constraint, tokenizer, vocab, "abd") == ["e"]
    matcher, masks = constraint.start(), torch.zeros(2, mask_words(vocab), dtype=torch.int32)
    for token in tokenizer.encode("ab", add_special_tokens=False):
        assert matcher.accept(token)
    matcher.fill(masks, 0)
    assert matcher.accept(c) and matcher.complete
    matcher.undo(1)
    matcher.fill(masks, 1)
    assert torch.equal(masks[1], masks[0])
    ended = tokenizer.encode("abc", add_special_tokens=False)
    with pytest.raises(ConstraintError, match="nothing can follow"):
        compiler.compile(ConstraintSpec("regex", "ab(de)?"), stops, ended)
    own = ConstraintCompiler(tokenizer, vocab, 20.0, eos_ids=[c])
    assert write(own.compile(ConstraintSpec("regex", "abcd|abx?"), stops, []), tokenizer, vocab, "ab") == [
        "<|im_end|>",
        "c",
        "x",
    ]
    assert write(own.compile(ConstraintSpec("regex", "[a-c]{2}"), stops, []), tokenizer, vocab, "a") == ["a", "b"]
    # Nor is it text where it ends nothing: what may be drawn may also be continued.
    assert write(own.compile(ConstraintSpec("regex", "[a-c]{2}"), (), []), tokenizer, vocab, "a") == ["a", "b"]
    with pytest.raises(ConstraintError, match="token 1"):
        own.compile(ConstraintSpec("regex", "[a-c]{2}"), (), tokenizer.encode("ac", add_special_tokens=False))


@pytest.mark.parametrize(
    ("kind", "source", "text", "after"),
    [
        ("regex", "a*", "aa", ["a"]),
        ("regex", "ab?", "a", ["b"]),
        ("regex", "ab?", "ab", []),
        ("choices", ("yes", "no"), "no", []),
        ("json_schema", OBJECT, '{"k": 7}', []),
    ],
)
def test_without_stop_tokens_nothing_follows_a_text_that_is_complete(
    compiler, tokenizer, vocab, kind, source, text, after
):
    constraint = compiler.compile(ConstraintSpec(kind, source), (), [])
    assert write(constraint, tokenizer, vocab, text) == sorted(after)
    matcher = constraint.start()
    begun = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        begun.append(matcher.complete)
        assert matcher.accept(token)
    assert matcher.complete and not (kind != "regex" and any(begun))
    eos = (tokenizer.eos_token_id,)
    assert write(compiler.compile(ConstraintSpec(kind, source), eos, []), tokenizer, vocab, text) == sorted(
        [*after, tokenizer.eos_token]
    )


def test_a_list_of_tokens_allows_these_and_no_stop_token(tokenizer, vocab):
    constraint = allow_list(ConstraintSpec("token_ids", (5, 6)), (7,), [], vocab)
    masks = torch.zeros(1, mask_words(vocab), dtype=torch.int32)
    constraint.start().fill(masks, 0)
    assert [token for token in range(vocab) if masks[0, token // 32] >> (token % 32) & 1] == [5, 6]


def test_a_completion_that_has_ended_cannot_be_continued(compiler, tokenizer):
    whole = [*tokenizer.encode("abc", add_special_tokens=False), tokenizer.eos_token_id]
    with pytest.raises(ConstraintError, match="nothing can follow"):
        compiler.compile(ConstraintSpec("regex", "abc"), (tokenizer.eos_token_id,), whole)
    for special in tokenizer.all_special_ids:  # none of them is text, and without stop tokens none is an end
        with pytest.raises(ConstraintError, match="token 3"):
            compiler.compile(ConstraintSpec("regex", "abc"), (), [*whole[:-1], special])


@pytest.mark.parametrize(("kind", "source", "text"), [("regex", "[^y]{1,99}", ""), ("json_schema", STRING, '"')])
def test_the_name_of_a_special_token_does_not_match_as_text(compiler, tokenizer, vocab, kind, source, text):
    """The text of a completion leaves special tokens out."""
    constraint = compiler.compile(ConstraintSpec(kind, source), (tokenizer.eos_token_id,), [])
    allowed = write(constraint, tokenizer, vocab, text)
    assert "<" in allowed and "<|im_start|>" not in allowed


def test_a_stop_token_that_json_excludes_ends_json_nevertheless(compiler, tokenizer, vocab):
    (tab,) = tokenizer.encode("\t", add_special_tokens=False)
    constraint = compiler.compile(ConstraintSpec("json_schema", '{"type": "boolean"}'), (tab,), [])
    assert write(constraint, tokenizer, vocab, "true") == ["\t"]


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "([a-z", "Unclosed"),
        ("grammar", "root ::= other", '"other" is not defined'),
        ("grammar", 'start ::= "x"', '"root" is not found'),
        ("grammar", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000, "Nest layer"),
        ("json_schema", '{"type": "strin"}', 'Unsupported type "strin"'),
        ("json_schema", "{nope", "it is not JSON"),
        ("json_schema", '{"type": "array", "items": {}, "uniqueItems": true} more', "it is not JSON"),
        ("json_schema", '{"type": "array", "items": {"type": "integer"}, "uniqueItems": true}', "'uniqueItems' at #"),
        ("json_schema", '{"type": "object", "properties": {"a": {"not": {}}}}', "'not' at #/properties/a"),
        ("json_schema", '{"minLength": 3}', "'minLength' at # .* without a 'type'"),
        ("json_schema", '{"anyOf": [{"type": "integer"}], "minimum": 5}', "'minimum' beside 'anyOf'"),
        ("json_schema", '{"type": "number", "multipleOf": 0.5}', "integers only"),
        ("json_schema", '{"type": "integer", "multipleOf": null}', "integers only"),
        ("json_schema", '{"type": "integer", "multipleOf": 1e400}', "integers only"),
        ("json_schema", '{"type": 5, "enum": [1]}', "'type' beside 'enum'"),
        ("json_schema", '{"type": 5}', "Type should be a string"),
        ("json_schema", '{"allOf": [{"type": "integer"}, {"maximum": 5}]}', "'allOf' of several"),
        ("json_schema", '{"type": "string", "pattern": "a", "minLength": 3}', "'pattern' with a length"),
        ("json_schema", '{"type": "array", "items": {}, "contains": {"type": "null"}}', "'contains' at #"),
        ("json_schema", '{"allOf": [{"type": "integer"}], "required": ["a"]}', "'required' beside 'allOf'"),
        ("json_schema", '{"$ref": "#/$defs/a", "properties": {}, "$defs": {"a": {}}}', "'properties' beside '.ref'"),
        ("json_schema", '{"anyOf": [{"type": "integer"}], "enum": ["a"]}', "'enum' beside 'anyOf'"),
        ("json_schema", '{"type": "string", "enum": ["a", 1]}', "'type' beside 'enum'"),
        ("json_schema", '{"type": "object", "anyOf": [{"type": "integer"}]}', "'type' beside 'anyOf'"),
        ("json_schema", '{"anyOf": []}', "'anyOf' at # is empty"),
        ("json_schema", '{"$ref": "https://example.com/a"}', "cannot be followed"),
        ("json_schema", '{"type": "integer", "multipleOf": 5, "minimum": 0}', "'multipleOf' at # .* with bounds"),
        ("json_schema", '{"type": "number", "minimum": 1e-7, "maximum": 2e-7}', "6 decimals"),
        (
            "json_schema",
            '{"properties": {"a": {}}, "required": ["b"], "additionalProperties": true}',
            "'b' is required",
        ),
        ("json_schema", '{"type": "object", "additionalProperties": {}, "minProperties": 2}', "'minProperties'"),
        ("json_schema", '{"type": "object", "properties": {"a": {}}, "patternProperties": {"a": {}}}', "'patternPr"),
        ("json_schema", '{"patternProperties": {"^a": {"type": "integer"}}}', "without a 'type'"),
        ("json_schema", '{"type": "string", "format": "json-pointer"}', "json-pointer"),
        ("json_schema", '{"type": "string", "format": "ipv4"}', "'ipv4' at # cannot be enforced; .* 'pattern'"),
        ("json_schema", '{"type": "array", "items": {"type": "string", "format": "ipv6"}}', "'ipv6' at #/items"),
        ("json_schema", '{"type": "string", "format": "date", "maxLength": 4}', "'date' with a pattern or a length"),
        ("json_schema", '{"type": "string", "pattern": "a^b"}', "not at an end of the text"),
        ("json_schema", json.dumps({"type": "string", "pattern": '^"$'}), "string of JSON"),
        ("json_schema", json.dumps({"type": "object", "patternProperties": {r"^\n$": {}}}), "string of JSON"),
        ("regex", "a$b", "'.' at character 1"),
        ("regex", "(a$)*", "'.' at character 2"),
        ("regex", "(^a)+", "an anchor is repeated"),
        ("regex", "(a|b)^c", "'\\^' at character 5"),
        ("regex", r"\Aab\Z", "A' is not supported"),
        ("regex", "a(?=b)", "lookahead or lookbehind, at character 1"),
        ("regex", "[0-\\p]", "in a class is not supported"),
        ("json_schema", '{"type": "string", "pattern": "(?!a)[ab]"}', "lookahead or lookbehind, at character 0"),
        ("json_schema", '{"type": "string", "pattern": "x(?:(?<=x)y)"}', "lookahead or lookbehind, at character 4"),
        ("json_schema", json.dumps({"type": "string", "pattern": r"[\p{L}]"}), "in a class is not supported"),
        ("json_schema", '{"type": "string", "pattern": 5}', "is not a string"),
        ("json_schema", '{"type": "integer", "multipleOf": 1025}', "up to 1024 only"),
        ("json_schema", '{"type": "number", "minimum": 1e400}', "does not say why"),
        ("regex", "a{4294967297}", "4294967297 repetitions are too many; 2147483647 are"),
        ("regex", "a{1,2147483648}", "2147483648 repetitions are too many"),
        ("regex", "(ab){" + "9" * 4000 + ",}", "repetitions are too many"),
        ("json_schema", '{"type": "string", "pattern": "a{4294967297}"}', "4294967297 repetitions are too many"),
        ("json_schema", '{"type": "object", "maxProperties": 4294967297}', "'maxProperties' at # .* up to 2147483647"),
        ("grammar", 'root ::= "a"{4294967297}', "4294967297 repetitions are too many"),
        ("grammar", 'root ::= "a"{ 1 , # so many\n 4294967297 }', "4294967297 repetitions are too many"),
        ("grammar", 'root ::= "a"{' + "9" * 50_000 + "}", "repetitions are too many"),
        ("regex", r"\ud83d\ude00", "half of a surrogate pair"),
        ("regex", r"[a\u{d800}]", "half of a surrogate pair"),
        ("regex", r"\x41b", "two hexadecimal digits"),
        ("regex", r"[\x{41}]", "two hexadecimal digits"),
        ("regex", "\ud83d", "half of a surrogate pair"),
        ("json_schema", json.dumps({"type": "string", "pattern": r"\uDFFF"}), "half of a surrogate pair"),
        ("json_schema", '{"const": "\ud800"}', "half of a surrogate pair"),
        ("grammar", r'root ::= "\ud800"', "half of a surrogate pair"),
        ("grammar", r"root ::= [a\U0000d800\xdc00]", "half of a surrogate pair"),
        ("grammar", r'root ::= Regex("\\ud800")', "half of a surrogate pair"),
        ("choices", ("a", "\ud800"), "half of a surrogate pair"),
        ("regex", "[^\n]{1,5}", "a class has a line break; write it as .* with a backslash"),
        ("regex", "a{2,1}", "^Lower bound is larger"),
        ("regex", r"[^\s\S]", "can write no text"),
        ("grammar", "root ::= root", "can write no text"),
        ("json_schema", '{"$ref": "#"}', "can write no text|Circular"),
        ("json_schema", '{"$ref": "#/x", "x": {"type": "array", "uniqueItems": true}}', "'uniqueItems' at #/x"),
        ("json_schema", '{"$ref": "#/a~1b", "a~1b": {"not": {}}}', "'not' at #/a~1b"),
        ("json_schema", '{"anyOf": [{"not": {}}, {"const": ' + "[" * 1500 + "]" * 1500 + "}]}", "nested too deep"),
        ("json_schema", '{"type":"array","items":' * 20_000 + "true" + "}" * 20_000, "nested too deep"),
    ],
)
def test_a_constraint_that_cannot_be_used_is_refused_with_the_reason(compiler, kind, source, reason):
    with pytest.raises(ConstraintError, match=reason) as caught:
        compiler.compile(ConstraintSpec(kind, source), (1,), [])
    assert "cpp" not in str(caught.value) and len(str(caught.value)) <= 500


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        ("^a$|^b$", "b"),
        ("(^a|(^b))c", "bc"),
        ("a(b$|[|)]$)", "a)"),
        (r"\x5e\$", "^$"),
        ("(?:^a)?$", "a"),
        ("[$^]", "^"),
    ],
)
def test_anchors_at_the_ends_of_the_text_are_allowed(compiler, tokenizer, vocab, regex, text):
    constraint = compiler.compile(ConstraintSpec("regex", regex), (tokenizer.eos_token_id,), [])
    assert write(constraint, tokenizer, vocab, text) == ["<|im_end|>"]


#: Nested groups, as deep as the largest message may contain: they would overflow the stack of the C++ compiler.
DEEP = "(" * 30_000 + "a" + ")" * 30_000


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", json.dumps({"type": "string", "pattern": DEEP})),
        ("json_schema", json.dumps({"type": "object", "patternProperties": {DEEP: {}}})),
        ("json_schema", json.dumps({"$ref": "#/x", "x": {"type": "string", "pattern": DEEP}})),
        ("json_schema", json.dumps({"type": "string", "pattern": DEEP}) + " x"),
        ("grammar", f'root ::= Regex("{DEEP}")'),
        ("grammar", 'root ::= [\\"] Regex("' + '(\\"' * 15_000 + ")" * 15_000 + '")'),
    ],
)
def test_source_that_would_overflow_the_stack_is_refused_before_it_is_compiled(compiler, kind, source):
    """The compiler would end this process."""
    with pytest.raises(ConstraintError, match="characters|not JSON"):
        compiler.compile(ConstraintSpec(kind, source), (1,), [])


def test_a_regular_expression_in_a_grammar_is_accepted(compiler, tokenizer, vocab):
    grammar = 'root ::= Regex("[ab]{2}") other\nother ::= "' + "c" * 3000 + '"'
    constraint = compiler.compile(ConstraintSpec("grammar", grammar), (tokenizer.eos_token_id,), [])
    assert write(constraint, tokenizer, vocab, "ab") == ["c"]


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("regex", r"\\ud800|\{4294967297\}", "\\ud800"),
        ("regex", "[{4294967297}]", "9"),
        ("regex", "a{0000000000003}", "aaa"),
        ("grammar", r'root ::= "\\ud800 {4294967297}" # {4294967297}', "\\ud800 {4294967297}"),
        ("grammar", r'root ::= [\]{4294967297}] n4294967297\nn4294967297 ::= "\u00e9"'.replace("\\n", "\n", 1), "9é"),
        ("regex", "()", ""),
        ("grammar", 'root ::= ""', ""),
    ],
)
def test_harmless_text_that_resembles_a_refused_part_is_accepted(compiler, tokenizer, vocab, kind, source, text):
    constraint = compiler.compile(ConstraintSpec(kind, source), (tokenizer.eos_token_id,), [])
    assert write(constraint, tokenizer, vocab, text) == ["<|im_end|>"]


def test_checks_take_little_time_for_any_input():
    """No work grows with the square of a text's length, or exponentially with depth."""
    began_s = time.process_time()
    for pattern in ("$" * 60_000, "a$|" * 20_000, "(a$|" * 10_000 + ")" * 10_000, "[" * 60_000, "^" * 60_000):
        regex_check.regex_problem(pattern, in_json=True)
    for grammar in ('"' + '\\"' * 30_000, "[" + "\\[" * 30_000, "\\x" + "0" * 60_000, "{9" * 30_000, "\\" * 60_000):
        regex_check.grammar_problem("Regex" + grammar)
    parts = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 20} for i in range(30)}
    schema = {"type": "object", "anyOf": [{"$ref": "#/$defs/d0"}], "$defs": parts}
    assert schema_check.schema_problem(json.dumps(schema)) is not None
    assert time.process_time() - began_s < 20


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": ["a", "b"]},
        {"type": ["number", "null"], "enum": [1, None]},
        {"type": "object", "anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "object"}}},
        {"type": "string", "format": "password", "minLength": 3},
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1},
        {"type": "string", "pattern": '^[^"]+$'},
        {"type": "number", "minimum": -0.5, "exclusiveMaximum": 1e6},
    ],
)
def test_schemas_that_can_be_enforced_are_accepted(compiler, tokenizer, schema):
    compiler.compile(ConstraintSpec("json_schema", json.dumps(schema)), (tokenizer.eos_token_id,), [])


@pytest.mark.parametrize(("begin", "breaks", "goes_on"), [(0xE0, 0x80, 0xA0), (0xED, 0xA0, 0x9F), (0xF0, 0x80, 0x90)])
def test_invalid_utf_8_is_excluded(compiler, tokenizer, vocab, begin, breaks, goes_on):
    texts = xgrammar.TokenizerInfo.from_huggingface(tokenizer).decoded_vocab
    first, wrong, right = (texts.index(bytes([byte])) for byte in (begin, breaks, goes_on))
    spec, eos = ConstraintSpec("regex", "[^y]{1,99}"), (tokenizer.eos_token_id,)
    matcher = compiler.compile(spec, eos, []).start()
    assert matcher.accept(first)
    masks = torch.zeros(2, mask_words(vocab), dtype=torch.int32)
    matcher.fill(masks, 0)
    compiler.compile(spec, eos, [first]).start().fill(masks, 1)
    for row in masks:
        assert not row[wrong // 32] >> (wrong % 32) & 1 and row[right // 32] >> (right % 32) & 1
    assert matcher.accept(right)
    matcher.fill(masks, 0)
    assert masks[0, wrong // 32] >> (wrong % 32) & 1, "the third byte may be any continuation byte"


@pytest.mark.parametrize(
    ("grammar", "coordinates", "least", "most"),
    [(spatial.point, 2, 2, 2), (spatial.detect, 3, 0, 12), (spatial.outline, 2, 6, 10)],
)
def test_spatial_grammars_repeat_points_of_location_tokens(tokenizer, grammar, coordinates, least, most):
    tokenizer = copy.deepcopy(tokenizer)
    words = [f"<loc{i}>" for i in range(16)]
    tokenizer.add_tokens(words)
    vocab, places = len(tokenizer), set(tokenizer.convert_tokens_to_ids(words))
    bounds = {} if grammar is spatial.point else {"least": least // coordinates, "most": most // coordinates}
    spec = ConstraintSpec("grammar", grammar(**bounds, words=spatial.vocabulary(words)))
    compiler = ConstraintCompiler(tokenizer, vocab, 200.0)
    matcher = compiler.compile(spec, (tokenizer.eos_token_id,), []).start()
    masks, may_end = torch.zeros(1, mask_words(vocab), dtype=torch.int32), []
    for at in range(most + 1):
        matcher.fill(masks, 0)
        allowed = {token for token in range(vocab) if masks[0, token // 32] >> (token % 32) & 1}
        may_end += [at] if tokenizer.eos_token_id in allowed else []
        assert allowed & places == (places if at < most else set())
        assert at == most or matcher.accept(min(places) + at % 16)
    assert may_end == list(range(least, most + 1, coordinates))


#: Nested repetitions: the compilation is quick, and then every token takes longer than the one before.
SLOW = """
import os, sys
from rollout.constraints.compiler import ConstraintCompiler, ConstraintError
from rollout.constraints.constraint_spec import ConstraintSpec
from rollout.text.codec import TextCodec
tokenizer = TextCodec(sys.argv[1]).tokenizer
compiler = ConstraintCompiler(tokenizer, len(tokenizer), 0.5)
slow = ConstraintSpec("regex", "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}")
try:
    compiler.compile(slow, (tokenizer.eos_token_id,), tokenizer.encode("a", add_special_tokens=False) * 300)
except ConstraintError as error:
    print(error, flush=True)
compiler._compile_s = 100.0  # on a busy machine the abandoned one leaves little time
compiler.compile(ConstraintSpec("regex", "a"), (tokenizer.eos_token_id,), [])
print("goes on", flush=True)
os._exit(0)  # a thread that returns while the interpreter ends would abort the process
"""


def test_a_compilation_that_takes_too_long_is_abandoned_and_the_next_one_works(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-c", SLOW, str(make_tokenizer_folder(tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.splitlines() == ["it was not compiled within 0.5 s; make it simpler", "goes on"], done.stderr


def test_a_model_with_an_unsupported_tokenizer_is_served_without_grammars(tmp_path):
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    constraints = constraints_for(load_text_codec(tmp_path), 400, 5.0)
    assert not constraints.grammars and "tokenizer" in constraints.missing and "install" not in constraints.missing


def test_without_the_compiler_the_reason_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)  # as if it were not installed
    missing = constraints_for(load_text_codec(make_tokenizer_folder(tmp_path)), 300, 5.0).missing
    assert "pip install '.[worker]'" in missing and "'rollout-engine[worker]'" in missing and "again" in missing
    assert "install" not in constraints_for(None, 300, 5.0).missing


def test_compiled_grammars_are_cached_and_the_least_recently_used_goes_first(tokenizer, vocab, compiled):
    first, second, third = (ConstraintSpec("regex", f"{letter}[a-z]{{1,200}}") for letter in "abc")

    def letters() -> list[str]:
        return [source.split('"')[1] for source, _ in compiled]

    large = ConstraintCompiler(tokenizer, vocab, 200.0)
    for spec in (first, second, first):
        large.compile(spec, (1,), [])
    assert letters() == ["a", "b"]
    small = ConstraintCompiler(tokenizer, vocab, 200.0, cache_bytes=int(1.1 * sum(size for _, size in compiled)))
    compiled.clear()
    for spec in (first, second, first, third, first, second):  # the third evicts the second
        small.compile(spec, (1,), [])
    assert letters() == ["a", "b", "c", "b"]


def test_a_thread_works_on_after_a_call_that_fails_or_hangs():
    thread = DeadlineThread("test")
    hang = DeadlineThread("never")  # its call hangs until the gate opens
    assert thread.call(lambda: 5, 60.0) == 5
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0, 60.0)
    gate = threading.Event()
    with pytest.raises(TimeoutError):
        hang.call(gate.wait, 0.05)
    assert (hang.left_behind, hang.call(lambda: 6, 60.0), thread.left_behind) == (1, 6, 0)
    gate.set()
    while hang.left_behind:  # until the call has returned
        time.sleep(0.001)
    thread.close()
    hang.close()
