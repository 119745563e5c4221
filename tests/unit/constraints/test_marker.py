"""Constraints that begin after a marker: where that is found, what is barred before it, and what may follow it."""

import random

import pytest
import torch

from rollout.constraints.compiler import ConstraintCompiler, ConstraintError, allow_list
from rollout.constraints.constraint_spec import ConstraintSpec
from rollout.constraints.marker import IdMarker, TextMarker, TokenTexts, ends_with
from rollout.constraints.matcher import Constraint, mask_words
from rollout.service.requests.constraint import ConstraintFields
from rollout.text.codec import TextCodec
from tests.support.tokenizer_folder import make_tokenizer_folder

xgrammar = pytest.importorskip("xgrammar")
OBJECT = '{"type": "object", "properties": {"k": {"const": 7}}, "required": ["k"]}'
KINDS = [("json_schema", OBJECT, '{"k":7}'), ("regex", "[ab]c", "ac"), ("choices", (" x", "y"), "y")]
KINDS += [("grammar", 'root ::= "(" root ")" | "z"', "(z)")]
END = "</think>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """It has `</think>` as one token, and texts that go beyond an end that is written in pieces."""
    corpus = ["a>{ b>( c>> d>[ the quick brown fox </ thinks is END>> and END>( " * 9]
    folder = make_tokenizer_folder(tmp_path_factory.mktemp("text"), corpus=corpus, vocab=340, markers=(END,))
    return TextCodec(folder).tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, len(tokenizer) + 3, 200.0)


def allowed(constraint: Constraint, tokens: list[int], vocab: int) -> set[int]:
    """The tokens that may follow these."""
    matcher = constraint.start()
    assert all(map(matcher.accept, tokens)), "the tokens are not allowed"
    masks = torch.zeros(1, mask_words(vocab), dtype=torch.int32)
    matcher.fill(masks, 0)
    return {token for token in range(vocab) if masks[0, token // 32] >> (token % 32) & 1}


def pieces(tokenizer, text: str) -> list[int]:
    """One token for each byte: the tokens of a text that no merge has touched."""
    return [token for char in text for token in tokenizer.encode(char, add_special_tokens=False)]


@pytest.mark.parametrize(("kind", "source", "text"), KINDS)
@pytest.mark.parametrize("white", ["", "\n", "\n\n", " \n"])
def test_the_constraint_begins_after_the_marker_and_white_space(compiler, tokenizer, kind, source, text, white):
    vocab, eos = len(tokenizer) + 3, tokenizer.eos_token_id
    constraint = compiler.compile(ConstraintSpec(kind, source, END), (eos,), [])
    plain = compiler.compile(ConstraintSpec(kind, source), (eos,), [])
    thoughts = tokenizer.encode("the quick brown fox, said " + text, add_special_tokens=False)
    assert constraint.free is not None and constraint.free.narrows(thoughts) == "no"
    assert len(allowed(constraint, thoughts, vocab)) == vocab, "everything, eos too"
    for marker in (
        tokenizer.encode(END, add_special_tokens=False),
        pieces(tokenizer, "</think") + pieces(tokenizer, ">"),
    ):
        begun = [*thoughts, *marker, *tokenizer.encode(white, add_special_tokens=False)]
        assert begun[len(thoughts) + len(marker) - 1] in constraint.free.ends
        assert constraint.free.narrows(begun[: len(thoughts) + len(marker)]) == "all"
        first = allowed(constraint, begun, vocab)
        assert allowed(plain, [], vocab) <= first and eos not in first
        assert {token for token in first - allowed(plain, [], vocab) if tokenizer.decode([token]).strip()} <= {
            token for token in range(vocab) if tokenizer.decode([token])[:1].isspace()
        }
        whole = [*begun, *tokenizer.encode(text, add_special_tokens=False)]
        assert allowed(constraint, whole, vocab) == {eos}
        assert not constraint.start().complete


def test_the_marker_is_one_token_or_several(compiler, tokenizer):
    assert len(tokenizer.encode(END, add_special_tokens=False)) == 1
    assert len(pieces(tokenizer, "</think") + pieces(tokenizer, ">")) == 8
    many = tokenizer.encode("a<END>", add_special_tokens=False)
    constraint = compiler.compile(ConstraintSpec("regex", "x", "<END>"), (1,), [])
    assert len(many) > 2 and constraint.free.narrows(many) == "all" and many[-1] in constraint.free.ends


def test_a_token_that_reaches_beyond_the_marker_begins_the_text_or_is_barred(compiler, tokenizer):
    vocab = len(tokenizer) + 3
    texts = compiler.texts.of
    reach = {texts[token]: token for token in range(vocab) if texts[token].startswith(b">") and len(texts[token]) > 1}
    assert len(reach) >= 3, "the tokenizer has tokens that begin with the end of the marker"
    begun = pieces(tokenizer, "so </think")
    for kind, source, _ in KINDS:
        constraint = compiler.compile(ConstraintSpec(kind, source, END), (1,), [])
        bad = {text: token for text, token in reach.items() if not _fits(compiler, kind, source, text[1:])}
        assert constraint.free.narrows(begun) == ("next" if bad else "no") and (
            not bad or begun[-1] in constraint.free.ends
        )
        assert allowed(constraint, begun, vocab) == set(range(vocab)) - set(bad.values())
        for text, token in reach.items():
            if text not in bad:
                assert constraint.free.narrows([*begun, token]) == "all"
                expected = _after(compiler, kind, source, text[1:], vocab)
                assert allowed(constraint, [*begun, token], vocab) == expected
        assert constraint.free.narrows([*begun, *pieces(tokenizer, "ing")]) == "no"


def _spaced(compiler, kind, source) -> Constraint:
    """The constraint as it is after a prompt that ends with its marker."""
    prompt = compiler.texts.of.index(END.encode())
    return compiler.compile(ConstraintSpec(kind, source, END), (1,), [], [prompt])


def _fits(compiler, kind, source, rest: bytes) -> bool:
    return _spaced(compiler, kind, source).start_after(rest, 0) is not None


def _after(compiler, kind, source, rest: bytes, vocab: int) -> set[int]:
    masks = torch.zeros(1, mask_words(vocab), dtype=torch.int32)
    _spaced(compiler, kind, source).start_after(rest, 0).fill(masks, 0)
    return {token for token in range(vocab) if masks[0, token // 32] >> (token % 32) & 1}


@pytest.mark.parametrize("seed", range(40))
def test_every_cut_of_every_text_finds_the_marker_where_the_text_has_it(seed):
    """A small alphabet, so that beginnings of the marker overlap with themselves and with what is around it."""
    rng = random.Random(seed)
    letters = [bytes([code]) for code in b"ab"]
    words = {b"".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(12)}
    texts = TokenTexts([*letters, *sorted(words - set(letters)), b""])
    text = b"".join(rng.choices(letters, k=rng.randint(1, 4)))
    taken = {b"".join(rng.choices(letters, k=rng.randint(1, 3))) for _ in range(4)}
    marker = TextMarker(text, texts, taken.__contains__, len(texts.of))
    for _ in range(60):
        tokens, whole = [], b""
        while len(tokens) < 12:
            barred = marker.barred(tokens)
            bad = set() if barred is None else {t for t in range(len(texts.of)) if barred[0] >> t & 1}
            for token, more in enumerate(texts.of):
                at = (whole + more).find(text)
                assert (token in bad) == (at >= 0 and not _good((whole + more)[at + len(text) :], taken))
            if bad and tokens and texts.of[tokens[-1]] and marker.barred([]) is None:
                assert tokens[-1] in marker.ends
            token = rng.choice([token for token in range(len(texts.of)) if token not in bad])
            tokens.append(token)
            whole += texts.of[token]
            rest = marker.rest(tokens[-marker.reach - 3 :])
            assert (rest is not None) == (text in whole)
            if rest is not None:
                assert token in marker.ends and whole.split(text, 1)[1] == rest
                break


def _good(rest: bytes, taken: set[bytes]) -> bool:
    return not rest or rest in taken


def test_token_ids_are_found_where_they_are_one_after_the_other():
    marker = IdMarker((3, 3, 5))
    found = [marker.rest(tokens) for tokens in ([3, 3, 5], [5, 3, 3, 3, 5], [3, 5], [3, 3], [], [3, 3, 5, 5])]
    assert found == [b"", b"", None, None, None, None] and marker.ends == {5} and marker.barred([3, 3]) is None


def test_a_matcher_goes_back_to_before_its_marker(compiler, tokenizer):
    vocab, eos = len(tokenizer) + 3, tokenizer.eos_token_id
    for marker in (
        pieces(tokenizer, "</think") + pieces(tokenizer, ">"),
        tokenizer.encode(END, add_special_tokens=False),
    ):
        tokens = [*pieces(tokenizer, "hm "), *marker, *pieces(tokenizer, '\n{"k":7}')]
        matcher = compiler.compile(ConstraintSpec("json_schema", OBJECT, END), (eos,), []).start()
        masks = torch.zeros(2, mask_words(vocab), dtype=torch.int32)
        for place, token in enumerate(tokens):
            matcher.fill(masks, 0)
            for far in range(1, len(tokens) - place + 1):
                assert all(map(matcher.accept, tokens[place : place + far]))
                matcher.undo(far)
                matcher.fill(masks, 1)
                assert torch.equal(masks[0], masks[1])
            assert matcher.accept(token)
        assert matcher.complete


def test_a_continued_completion_may_have_its_marker_or_not(compiler, tokenizer):
    vocab, eos = len(tokenizer) + 3, tokenizer.eos_token_id
    spec = ConstraintSpec("regex", "[ab]c", END)
    whole = [*pieces(tokenizer, "so "), *tokenizer.encode(END, add_special_tokens=False), *pieces(tokenizer, "\nac")]
    expected = [allowed(compiler.compile(spec, (eos,), []), whole[:count], vocab) for count in range(len(whole) + 1)]
    for count in range(len(whole) + 1):
        constraint = compiler.compile(spec, (eos,), whole[:count])
        assert (constraint.free is None) == (count > 3)
        assert [allowed(constraint, whole[count:end], vocab) for end in range(count, len(whole) + 1)] == expected[
            count:
        ]
    with pytest.raises(ConstraintError, match="token 5"):
        compiler.compile(spec, (eos,), [*whole[:5], *pieces(tokenizer, "x")])
    split = [*pieces(tokenizer, "</thin"), *pieces(tokenizer, "k")]
    assert compiler.compile(spec, (eos,), split).free.narrows([*split, *pieces(tokenizer, ">")]) == "all"


@pytest.mark.parametrize(
    ("prompt", "ended"),
    [
        ("<think>\n\n</think>\n\n", True),
        ("</think>", True),
        ("</think>\n", True),
        ("<think>\n", False),
        ("</think>\n\nHi", False),
        ("", False),
    ],
)
def test_after_a_prompt_that_ends_the_thoughts_the_constraint_holds_from_the_first_token(
    compiler, tokenizer, prompt, ended
):
    tokens = tokenizer.encode(prompt, add_special_tokens=False)
    ids = tuple(tokenizer.encode(END, add_special_tokens=False))
    for after in (END, ids):
        constraint = compiler.compile(ConstraintSpec("regex", "[ab]c", after), (1,), [], tokens)
        assert (constraint.free is None) == ended
    listed = allow_list(ConstraintSpec("token_ids", (5,), ids), (), [], len(tokenizer), tokens, compiler.texts)
    assert (listed.free is None) == ended
    assert not ends_with(tokens[:-1] if ended and prompt.endswith(END) else [], ids, None)


def test_a_list_of_tokens_may_begin_after_a_marker_and_bars_what_reaches_beyond_it(compiler, tokenizer):
    vocab, a, b = len(tokenizer), *pieces(tokenizer, "ab")
    spec = ConstraintSpec("token_ids", (a, b), END)
    constraint = allow_list(spec, (), [], vocab, (), compiler.texts)
    assert allowed(constraint, pieces(tokenizer, "</think") + pieces(tokenizer, ">"), vocab) == {a, b}
    beyond = {
        token
        for token in range(vocab)
        if compiler.texts.of[token].startswith(b">") and len(compiler.texts.of[token]) > 1
    }
    assert allowed(constraint, pieces(tokenizer, "</think"), vocab) == set(range(vocab)) - beyond
    ids = allow_list(ConstraintSpec("token_ids", (a,), (7, 8)), (), [7], vocab)
    assert ids.free.narrows([7, 8]) == "all" and allowed(ids, [8], vocab) == {a}
    with pytest.raises(ConstraintError, match="token 2"):
        allow_list(ConstraintSpec("token_ids", (a,), (7, 8)), (), [7, 8, b], vocab)


@pytest.mark.parametrize(
    ("spec", "stop", "reason"),
    [
        (ConstraintSpec("regex", "a", (5, 1)), (1,), "stop token"),
        (ConstraintSpec("regex", "a", "<|im_end|>"), None, "stop token"),
        (ConstraintSpec("token_ids", (3,), (5, 1)), (1,), "stop token"),
    ],
)
def test_a_marker_that_ends_the_completion_is_refused(compiler, tokenizer, spec, stop, reason):
    stop = (tokenizer.eos_token_id,) if stop is None else stop
    with pytest.raises(ConstraintError, match=reason) as refused:
        if spec.kind == "token_ids":
            allow_list(spec, stop, [], len(tokenizer))
        else:
            compiler.compile(spec, stop, [])
    assert refused.value.field == "after"


@pytest.mark.parametrize(("kind", "source"), [("regex", r"[^\s\S]"), ("grammar", "root ::= root")])
def test_a_constraint_that_no_text_obeys_is_refused_though_white_space_may_follow_the_marker(compiler, kind, source):
    with pytest.raises(ConstraintError, match="can write no text"):
        compiler.compile(ConstraintSpec(kind, source, END), (1,), [])


def test_what_markers_take_counts_towards_the_limit_of_what_is_kept(tokenizer, compiled):
    specs = [ConstraintSpec("regex", letter, ">" * 60) for letter in "ab"]
    limit = 1 << 30
    for times in (2, 4):
        compiler = ConstraintCompiler(tokenizer, 200_000, 200.0, cache_bytes=limit)
        compiled.clear()
        for spec in (*specs, *specs):
            compiler.compile(spec, (1,), [])
        assert len(compiled) == times
        limit = sum(size for _, size in compiled) + 25_000  # of a mask; each marker has one


def test_half_of_a_character_is_no_marker():
    with pytest.raises(ValueError, match="surrogate"):
        ConstraintFields(regex="a", after="x\ud800")
    assert ConstraintFields(regex="a", after=[5, 6]).to_spec() == ConstraintSpec("regex", "a", (5, 6))


def test_a_marker_that_no_token_ends_with_is_refused():
    with pytest.raises(ConstraintError) as refused:
        allow_list(ConstraintSpec("token_ids", (1,), "x"), (), [], 3, (), TokenTexts([b"a", b"b", b""]))
    assert refused.value.field == "after"


def test_where_a_token_is_barred_from_the_start_there_is_no_free_part():
    texts = TokenTexts([b"a", b"#", b"#b", b"b"])
    constraint = allow_list(ConstraintSpec("token_ids", (3,), "#"), (), [], 4, (), texts)
    assert (
        constraint.free is None and allowed(constraint, [0], 4) == {0, 1, 3} and allowed(constraint, [0, 1], 4) == {3}
    )
