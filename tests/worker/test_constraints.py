"""Constrained completions from a real worker: valid every time, or refused with the reason; others go on."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from scripts import spatial
from tests.support.kernels.grids import nightly
from tests.support.schemas import random_schema
from tests.support.tokenizer_folder import make_tokenizer_folder
from tests.support.worker.harness import launch
from trainer_bridge.client.blocking import RolloutClient
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.wire.errors import BadRequest

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")
THOUGHTS_END = "</think>"
#: A model without sense likes white space between the parts of JSON as much as anything else.
WHITE = (" ", "\t", "\n", "\r")


@pytest.fixture(scope="module")
def scribbler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker whose model writes bytes at random."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = make_tokenizer_folder(tmp_path_factory.mktemp("scribbler"), markers=(THOUGHTS_END,))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 5,  # as real models have more than their tokenizer
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer_folder(folder, markers=(THOUGHTS_END,))
    limits = {"max_rows": 64, "max_queue": 2048, "mask_s": 5.0}  # no mask is late because the machine is busy
    with launch(folder, log=folder / "log", prefix_cache=False, **limits) as worker:
        yield worker


@pytest.fixture
def client(scribbler: WorkerProcess) -> Iterator[RolloutClient]:
    with RolloutClient(scribbler.endpoint, timeout_s=120) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(scribbler: WorkerProcess) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(scribbler.log_path.parent)


@pytest.fixture(scope="module")
def eos(tokenizer: Any) -> int:
    return tokenizer.eos_token_id


@pytest.fixture(scope="module")
def bias(tokenizer: Any) -> dict[int, float]:
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    return {token: -8.0 for token, text in texts.items() if text and all(char in WHITE for char in text)}


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_every_output_of_random_schemas_is_valid(client: RolloutClient, bias: dict[int, float], count: int) -> None:
    schemas = [random_schema(seed) for seed in range(count)]
    results = client.generate_many(
        {
            "prompt": "make json: ",
            "max_tokens": 600,
            "seed": seed,
            "logit_bias": bias,
            "return_text": True,
            "constraint": {"json_schema": schema if seed % 2 else json.dumps(schema)},
        }
        for seed, schema in enumerate(schemas)
    )
    ends: dict[str, int] = {}
    for schema, result in zip(schemas, results, strict=True):
        (completion,) = result.completions
        ends[completion.finish_reason] = ends.get(completion.finish_reason, 0) + 1
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
            assert completion.drawn_logprobs is not None
    assert ends.keys() <= {"stop", "length"} and ends["stop"] >= 0.98 * count, ends


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2,4}"}, "[a-f]{3}-[0-9]{2,4}"),
        ({"choices": ["yes", "no", "perhaps é👍"]}, "yes|no|perhaps é👍"),
        ({"grammar": 'root ::= "(" root ")" | [xyz]'}, r"\(*[xyz]\)*"),
    ],
)
def test_texts_fit_with_and_without_neighbours(client: RolloutClient, constraint: dict, fits: str) -> None:
    bound: dict = {"prompt": "abc", "max_tokens": 60, "n": 8, "seed": 6, "constraint": constraint, "return_text": True}
    free, result = client.generate_many([{"prompt": "abc", "max_tokens": 60, "n": 4, "seed": 5}, bound])
    ended = [completion for completion in result.completions if completion.finish_reason == "stop"]
    assert len(ended) >= 4
    assert all(re.fullmatch(fits, completion.text or "") for completion in ended)
    alone = client.generate("abc", max_tokens=60, n=4, seed=5)
    for beside, by_itself in zip(free.completions, alone.completions, strict=True):
        assert beside.token_ids.tolist() == by_itself.token_ids.tolist()


def test_an_allow_list_allows_its_tokens_and_an_end_only_if_that_is_among_them(client: RolloutClient, eos: int) -> None:
    allowed: Any = {"constraint": {"token_ids": [40, 41]}}
    drawn = [
        completion.token_ids.tolist()
        for result in client.generate_many(["abc"] * 10, max_tokens=1, n=60, **allowed)
        for completion in result.completions
    ]
    assert {40, 41} == {token for (token,) in drawn} and len(drawn) == 600
    for stop in ({}, {"ignore_eos": True}, {"min_tokens": 7}):
        (completion,) = client.generate("abc", max_tokens=30, seed=1, stop=stop, **allowed).completions
        assert set(completion.token_ids.tolist()) <= {40, 41} and completion.finish_reason == "length"
    ended: Any = {"max_tokens": 60, "n": 8, "seed": 1, "constraint": {"token_ids": [40, eos]}}
    for completion in client.generate("abc", **ended).completions:
        *tokens, last = completion.token_ids.tolist()
        assert set(tokens) <= {40} and (completion.finish_reason, last) == ("stop", eos)
    for completion in client.generate("abc", stop={"min_tokens": 9}, **ended).completions:
        assert completion.token_ids.tolist()[:9] == [40] * 9 and completion.finish_reason == "stop"
    for completion in client.generate("abc", stop={"ignore_eos": True}, **ended).completions:
        assert set(completion.token_ids.tolist()) == {40, eos} and completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        ({"regex": "[a-f]{3}"}, "[a-f]{3}"),
        ({"choices": ["yes", "no"]}, "yes|no"),
        ({"json_schema": {"type": "boolean"}}, "true|false"),
        ({"grammar": 'root ::= "(" [xyz] ")"'}, r"\([xyz]\)"),
    ],
)
def test_a_text_ends_when_it_is_whole_though_eos_is_ignored_or_more_tokens_are_wanted(
    client: RolloutClient, eos: int, constraint: dict, fits: str
) -> None:
    bound: dict = {"prompt": "abc", "max_tokens": 60, "n": 8, "seed": 6, "constraint": constraint, "return_text": True}
    ignored, longer = client.generate_many(
        [{**bound, "stop": {"ignore_eos": True}}, {**bound, "stop": {"min_tokens": 20}}]
    )
    for completion in ignored.completions:
        assert re.fullmatch(fits, completion.text or "") and eos not in completion.token_ids
        assert (completion.finish_reason, completion.stop) == ("stop", None)
    for completion in longer.completions:
        assert re.fullmatch(fits, completion.text or "")
        assert (completion.finish_reason, completion.stop, completion.token_ids[-1]) == ("stop", eos, eos)


def test_min_tokens_make_a_text_longer_where_it_may_be(client: RolloutClient) -> None:
    bound: dict = {"max_tokens": 80, "n": 8, "seed": 6, "constraint": {"regex": "[ab]*"}, "return_text": True}
    for completion in client.generate("abc", stop={"min_tokens": 20}, **bound).completions:
        assert len(completion) > 20 and re.fullmatch("[ab]{20,}", completion.text or "")
    for completion in client.generate("abc", stop={"ignore_eos": True}, **bound).completions:
        assert len(completion) == 80 and completion.finish_reason == "length"


def test_a_continued_completion_stays_in_its_constraint(client: RolloutClient) -> None:
    constraint = {"regex": "(ab){50}"}
    (whole,) = client.generate("abc", max_tokens=120, seed=3, constraint=constraint, return_text=True).completions
    assert whole.text == "ab" * 50 and whole.finish_reason == "stop"
    prior = {"token_ids": whole.token_ids[:31].tolist(), "seed": whole.seed}
    (again,) = client.generate("abc", max_tokens=120, continue_from=prior, constraint=constraint).completions
    assert again.token_ids.tolist() == whole.token_ids.tolist()
    with pytest.raises(BadRequest, match="does not allow token 0"):
        client.generate("abc", max_tokens=9, continue_from={"token_ids": [40], "seed": 1}, constraint={"regex": "z"})


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"constraint": {"regex": "(["}}, "constraint.regex", "Unclosed"),
        ({"constraint": {"grammar": "root ::= nothing"}}, "constraint.grammar", "not defined"),
        ({"constraint": {"json_schema": {"type": "strin"}}}, "constraint.json_schema", "Unsupported type"),
        ({"constraint": {"json_schema": "5" * 65_537}}, "constraint.json_schema", "65536 characters"),
        ({"constraint": {"json_schema": [5]}}, "constraint.json_schema", "as a map"),
        (
            {"constraint": {"json_schema": {"type": "string", "pattern": "(" * 32_000 + "a" + ")" * 32_000}}},
            "constraint.json_schema",
            "more than 4096 characters",
        ),
        ({"constraint": {"regex": "a", "choices": ["a"]}}, "constraint", "exactly one"),
        ({"constraint": {}}, "constraint", "exactly one"),
        ({"constraint": {"choices": []}}, "constraint.choices", "at least 1"),
        ({"constraint": {"choices": ["a" * 50_000, "b" * 50_000]}}, "constraint", "65536 characters"),
        ({"constraint": {"token_ids": []}}, "constraint", "at least one"),
        ({"constraint": {"token_ids": [99_999]}}, "constraint.token_ids", "vocabulary"),
        ({"constraint": {"pattern": "a"}}, "constraint.pattern", "unknown"),
    ],
)
def test_unusable_constraints_are_refused_with_the_reason(
    client: RolloutClient, fields: dict, field: str, reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        client.generate("abc", max_tokens=9, **fields)
    assert caught.value.field == field


@pytest.fixture(scope="module")
def thinks(tokenizer: Any, eos: int) -> dict[int, float]:
    """A bias with which the model soon ends its thoughts, and never the completion before."""
    return {tokenizer.convert_tokens_to_ids(THOUGHTS_END): 4.0, eos: -100.0}


#: Constraints, and a pattern of what fits, where there is one.
AFTER = {
    "json_schema": ({"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"]}, None),
    "regex": ("[a-f]{3}-[0-9]{2,4}", "[a-f]{3}-[0-9]{2,4}"),
    "choices": (["yes", "no", "perhaps é👍"], "yes|no|perhaps é👍"),
    "grammar": ('root ::= "(" [xyz] ")"', r"\([xyz]\)"),
    "token_ids": ([70, 71], None),
}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        *((kind, "text") for kind in AFTER),
        ("regex", "ids"),
        *nightly(*((kind, "ids") for kind in AFTER if kind != "regex")),
    ],
)
def test_a_constraint_begins_after_the_thoughts(
    client: RolloutClient,
    tokenizer: Any,
    thinks: dict[int, float],
    bias: dict[int, float],
    kind: str,
    given: str,
) -> None:
    value, fits = AFTER[kind]
    constraint, end = {kind: value}, tokenizer.convert_tokens_to_ids(THOUGHTS_END)
    bound = {**constraint, "after": THOUGHTS_END if given == "text" else [end]}
    asked: dict = {"prompt": "abc", "max_tokens": 300, "n": 8, "seed": 6, "constraint": bound, "return_text": True}
    asked["logit_bias"] = bias | thinks
    free, result = client.generate_many([{**asked, "constraint": None}, asked])
    ended = 0
    for unbound, completion in zip(free.completions, result.completions, strict=True):
        tokens, text = completion.token_ids.tolist(), completion.text or ""
        assert text.count(THOUGHTS_END) == 1 or "token_ids" not in constraint
        at = tokens.index(end) + 1
        assert tokens[:at] == unbound.token_ids.tolist()[:at], "the thoughts are free"
        answer = text.split(THOUGHTS_END, 1)[1].lstrip(" \n\r\t")
        ended += completion.finish_reason == "stop"
        if "token_ids" in constraint:
            assert set(tokens[at:]) <= {70, 71} and completion.finish_reason == "length"
        elif completion.finish_reason == "stop":
            assert type(json.loads(answer)["k"]) is bool if fits is None else re.fullmatch(fits, answer)
    assert ended >= 6 or "token_ids" in constraint


def test_thoughts_that_do_not_end_are_free_and_end_as_they_may(client: RolloutClient, eos: int, tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids(THOUGHTS_END)
    asked: dict = {"max_tokens": 40, "n": 8, "seed": 2, "logit_bias": {end: -100.0, eos: 3.0}, "return_text": True}
    free = client.generate("abc", **asked)
    bound = client.generate("abc", constraint={"choices": ["yes"], "after": THOUGHTS_END}, **asked)
    for ours, theirs in zip(bound.completions, free.completions, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert (ours.finish_reason, ours.stop) == (theirs.finish_reason, theirs.stop)
    assert {completion.finish_reason for completion in bound.completions} >= {"stop"}
    stopped = client.generate("abc", stop=["e"], constraint={"choices": ["yes"], "after": THOUGHTS_END}, **asked)
    assert {completion.stop for completion in stopped.completions} <= {"e", eos, None}


@pytest.mark.parametrize("prompt", ["abc<think>\n\n</think>\n\n", "abc</think>"])
def test_after_a_prompt_without_thoughts_the_answer_begins_at_once(
    client: RolloutClient, tokenizer: Any, prompt: str
) -> None:
    for given in (prompt, tokenizer.encode(prompt)):
        constraint = {"choices": ["yes", "no"], "after": THOUGHTS_END}
        (completion,) = client.generate(
            given, max_tokens=80, seed=3, constraint=constraint, return_text=True
        ).completions
        assert (completion.text or "").strip() in ("yes", "no") and completion.finish_reason == "stop"


def test_a_completion_is_continued_before_and_after_its_thoughts_end(
    client: RolloutClient, thinks: dict[int, float], bias: dict[int, float]
) -> None:
    asked: dict = {
        "max_tokens": 200,
        "constraint": {"regex": "(ab){9}", "after": THOUGHTS_END},
        "logit_bias": bias | thinks,
    }
    (whole,) = client.generate("abc", seed=4, **asked).completions
    assert whole.finish_reason == "stop"
    for count in range(1, len(whole), 3):
        prior = {"token_ids": whole.token_ids[:count].tolist(), "seed": whole.seed}
        (again,) = client.generate("abc", continue_from=prior, **asked).completions
        assert again.token_ids.tolist() == whole.token_ids.tolist()
    with client.session() as talk:
        turn = talk.generate("abc", seed=4, **asked).completions[0]
    assert turn.token_ids.tolist() == whole.token_ids.tolist()
    stream = client.generate("abc", seed=4, stream="tokens", stream_every=1, **asked)
    assert [token for chunk in stream for token in chunk.token_ids] == whole.token_ids.tolist()


@pytest.mark.parametrize(
    ("after", "field"),
    [
        ("", "constraint.after"),
        ([], "constraint.after"),
        ("x" * 65, "constraint.after"),
        ([1] * 65, "constraint.after"),
        ([99_999], "constraint.after"),
        ([-1], "constraint.after"),
        (["a"], "constraint.after"),
        (5, "constraint.after"),
        (True, "constraint.after"),
        ("<|im_end|>", "constraint.after"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_marker_that_makes_no_sense_is_refused_by_name(client: RolloutClient, after: Any, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        client.generate("abc", max_tokens=9, constraint={"regex": "a", "after": after})
    assert caught.value.field == field
    with pytest.raises(BadRequest, match="exactly one"):
        client.generate("abc", max_tokens=9, constraint={"after": THOUGHTS_END})


@pytest.mark.nightly
def test_a_constraint_that_hangs_the_worker_costs_its_own_completion(client: RolloutClient, eos: int) -> None:
    """Nested repetitions: every token takes longer to follow than the one before."""
    nested = {"regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"}
    both = [{"stop": {"ignore_eos": True}}, {"constraint": nested, "logit_bias": {eos: -100.0}}]
    free, hangs = client.generate_many({"prompt": "abc", "max_tokens": 2000, "seed": 5, **fields} for fields in both)
    (hung,) = hangs.completions
    assert hung.finish_reason == "error" and set(hung.token_ids.tolist()) == {hung.token_ids[0]}
    assert len(free.completions[0].token_ids) == 2000
    result = client.generate("abc", max_tokens=9, seed=4, constraint={"choices": ["still here"]}, return_text=True)
    assert result.completions[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("grammar", "numbers", "least", "most"),
    [
        (spatial.point(), 2, 1, 1),
        (spatial.detect(most=4), 3, 0, 4),
        (spatial.detect(least=2, most=3), 3, 2, 3),
        (spatial.outline(3, 12), 2, 3, 12),
    ],
    ids=["point", "detect", "detect some", "outline"],
)
def test_places_in_a_picture(client: RolloutClient, grammar: str, numbers: int, least: int, most: int) -> None:
    result = client.generate("abc", max_tokens=400, n=16, seed=1, constraint={"grammar": grammar}, return_text=True)
    for completion in result.completions:
        assert completion.finish_reason == "stop" and completion.text is not None
        lines = [[int(number) for number in line.split(" ")] for line in completion.text.split("\n") if line]
        assert least <= len(lines) <= most
        assert all(len(line) == numbers and 0 <= min(line) and max(line) <= spatial.LARGEST for line in lines)
    assert len({completion.text for completion in result.completions}) > 4


def test_bounds_of_places_that_make_no_sense_are_refused() -> None:
    for least, most in ((3, 2), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match="empty or negative"):
            spatial.detect(least, most)
