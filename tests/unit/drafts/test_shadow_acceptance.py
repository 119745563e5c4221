"""The shadow meter counts what equality would have accepted."""

import json
import random

import numpy as np
import pytest
import torch
from rollout_kernels.step import draft_by_ngrams, ngrams

from rollout.engine.features.drafts.suffix_drafter import SuffixDrafter
from scripts.check.shadow_acceptance import DRAFTERS, Acceptance, Group, NgramDrafter, main, play, read_groups
from tests.support.engine.harness import Bench, load
from tests.support.kernels.grids import nightly
from tests.support.models.families import make_checkpoint
from tests.support.ngrams import followed
from trainer_bridge.client.journal import Journal
from trainer_bridge.client.results import Chunk, GenerateResult, Timing, read_completion

PROMPT = list(range(100, 110))


def group(*completions: list[int]) -> Group:
    return Group(np.array(PROMPT, dtype=np.int32), list(completions))


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(100_000), length)


def test_text_without_repetition_yields_one_token_a_step():
    found = play([group(text(200))], SuffixDrafter(10_000), k=3, late=1)[0]
    assert (found.steps, found.tokens, found.tokens_a_step) == (199, 199, 1.0)


def test_an_epoch_later_every_draft_is_accepted():
    same = text(201)
    for late in (0, 1):
        first, second = play([group(same), group(same)], SuffixDrafter(10_000), k=3, late=late)
        assert first.tokens_a_step == 1.0
        assert second.steps == 50 and second.drafted == second.accepted and second.sources == {"earlier": 150}


def test_a_late_drafter_begins_one_step_later():
    first = text(43)
    again = [*first, *first[:23]]  # three tokens are drawn before a match is seen
    early, late = (play([group(again)], SuffixDrafter(10_000), 3, late)[0] for late in (0, 1))
    assert early.steps == 42 + 3 + 20 // 4 and early.sources == {"own": 15}
    assert late.steps == early.steps + 1
    assert early.tokens == late.tokens == len(again) - 1


def test_siblings_and_the_prompt_are_sources():
    same = text(60)
    found = play([group(same, [same[0], *same])], SuffixDrafter(10_000), k=2)[0]
    assert found.sources["group"] > 0
    copied = play([group([PROMPT[0], PROMPT[1], PROMPT[2], *PROMPT[3:]])], SuffixDrafter(10_000), k=2)[0]
    assert set(copied.sources) == {"prompt"}


@pytest.mark.parametrize(("drafter", "late"), [("suffix", 0), ("suffix", 1), ("ngram", 0)])
def test_totals_add_up(drafter, late):
    groups = [group(text(40, 1) * 2, text(40, 1)), group(text(50, 2)), group(text(40, 1))]
    parts, total = play(groups, DRAFTERS[drafter](10_000), 3, late), Acceptance(3)
    for part in parts:
        total += part
        assert part.tokens == part.steps + sum(part.accepted)
    assert total.tokens == sum(len(completion) - 1 for each in groups for completion in each.completions)
    assert all(a >= b for a, b in zip(total.accepted, total.accepted[1:], strict=False))
    assert sum(total.sources.values()) == sum(total.accepted)


def test_completions_beyond_the_kept_tokens_are_no_source():
    same = text(201)
    kept, dropped = (play([group(same), group(same)], SuffixDrafter(tokens), 3)[1] for tokens in (10_000, 100))
    assert kept.tokens_a_step == 4.0 and dropped.tokens_a_step == 1.0


# --- n-grams of the device ------------------------------------------------------------------------------------------


def few_tokens(length: int, seed: int, different: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(different) + 3 for _ in range(length)]


def grown(whole: list[int], prompt_length: int, want: int, reach: int | None = None, most: int = 5):
    """The texts of a completion that grows by up to `most` tokens a step, with what the drafter expects after each."""
    rng, drafter, prompt = random.Random(0), NgramDrafter(reach), np.array(whole[:prompt_length], dtype=np.int32)
    drafter.matched_path("a", prompt, [], 0)
    seen = 1
    while seen <= len(whole) - prompt_length:
        yield whole[: prompt_length + seen], drafter.matched_path("a", prompt, whole[prompt_length:][:seen], want)[1]
        seen += rng.randint(1, most)


@pytest.mark.parametrize("different", [1, 2, 3, 6, 40, 100_000])
@pytest.mark.parametrize("seed", range(3))
def test_ngrams_are_those_of_the_loop(different, seed):
    for text, path in grown(few_tokens(150, seed, different), (0, 1, 30)[seed], 1 + 3 * seed):
        assert path == followed(text, 1 + 3 * seed)


@pytest.mark.parametrize(("reach", "different"), [(ngrams.REACH, 3), (1, 2), (12, 40), (40, 4)])
def test_ngrams_are_those_of_the_device(reach, different):
    """Also in a text that is longer than what is searched."""
    pages, guesses = torch.arange(50)[None], torch.zeros(1, 3, dtype=torch.int64)
    for text, path in grown(few_tokens(180, 0, different), 30, 3, reach):
        tokens = torch.tensor(text + [0] * (200 - len(text)), dtype=torch.int32).view(50, 4)
        row = torch.tensor([[text[-1], len(text) - 1]])
        draft_by_ngrams(torch.tensor([0]), row, pages, tokens, guesses, last=0, length=1, reach=reach)
        assert guesses[0].tolist() == path


def test_ngrams_come_from_the_prompt_or_the_row_itself():
    same = text(21)
    epochs = play([group(same, same), group(same)], NgramDrafter(), 3)
    assert [each.tokens_a_step for each in epochs] == [1.0, 1.0], "neither siblings nor earlier completions"
    assert play([group([*same, *same])], NgramDrafter(), 3)[0].sources == {"own": 15}
    assert set(play([group(PROMPT)], NgramDrafter(), 3)[0].sources) == {"prompt"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    make_checkpoint("qwen3", folder)
    return folder


@pytest.mark.parametrize("k", [3, *nightly(1, 7)])
@pytest.mark.parametrize("depth", [2, *nightly(1)])
def test_ngrams_have_accepted_what_an_engine_has(checkpoint, depth, k):
    """At each step; in a pipeline of two steps until drafts in flight count towards `max_tokens`."""
    prompt, most = few_tokens(40, 0, 6), 80
    bench = Bench(load(checkpoint), speculation="ngram", speculation_tokens=k, pipeline_depth=depth)
    bias = tuple((token, 20.0) for token in range(3, 9))
    bench.submit("a", prompt, most, sampling={"temperature": 0.3, "seed": 1, "logit_bias": bias})
    counters, steps = bench.engine.roster.counters, {}
    bench.engine.tick()
    while bench.engine.busy:
        bench.engine.tick()
        steps[counters.decode_rows] = bench.drafts.accepted
    bench.close()
    tokens, compared = bench.tokens("a"), 0
    assert len(tokens) == most
    for rows, accepted in steps.items():
        drawn = 1 + rows + accepted
        if drawn <= most - 2 * k * (depth - 1):
            (found,) = play([Group(np.array(prompt, dtype=np.int32), [tokens[:drawn]])], NgramDrafter(), k)
            assert (found.steps, sum(found.accepted)) == (rows, accepted)
            compared = accepted
    assert compared > 5
    if depth == 1:
        assert drawn == most and sum(found.drafted) == bench.drafts.drafted
        assert found.tokens_a_step == 1 + bench.drafts.accepted / counters.decode_rows


# --- input and command ------------------------------------------------------------------------------------------------


def write_journal(path, completions: list[list[int]]) -> None:
    journal = Journal(path)
    journal.begin("r", "mark", 1, 0.0, {"prompt": np.array(PROMPT, dtype=np.int32), "n": len(completions)})
    for index, tokens in enumerate(completions):
        for start, end in ((0, 3), (3, len(tokens))):
            count = end - start
            fields = {
                "index": index,
                "token_ids": np.array(tokens[start:end], dtype=np.int32),
                "versions": [[0, count]],
            }
            zeros = {name: np.zeros(count, dtype=np.float32) for name in ("logprobs", "raw_logprobs")}
            journal.add("r", Chunk(start, read_completion({**fields, **zeros})))
    journal.finish("r", GenerateResult("r", [], len(PROMPT), 0, Timing(), 0))
    journal.begin("unfinished", "mark", 1, 0.0, {"prompt": np.array(PROMPT, dtype=np.int32)})
    journal.close()


def test_all_kinds_of_input_give_the_same_groups(tmp_path):
    datasets = pytest.importorskip("datasets")
    completions = [text(9, 1), text(12, 2)]
    write_journal(tmp_path / "journal", completions)
    whole = {"prompt_token_ids": PROMPT, "completions": completions}
    as_maps = {**whole, "completions": [{"token_ids": tokens} for tokens in completions]}
    singles = [{**whole, "completions": tokens} for tokens in completions]
    for name, records in (("whole", [whole]), ("maps", [as_maps]), ("singles", singles)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    datasets.Dataset.from_list(singles).save_to_disk(tmp_path / "dataset")
    for name in ("journal", "whole.jsonl", "maps.jsonl", "singles.jsonl", "dataset"):
        (found,) = read_groups(tmp_path / name, "prompt_token_ids", "completions")
        assert found.prompt.tolist() == PROMPT and found.completions == completions, name


def test_neighbours_are_a_group_while_their_prompt_is_the_same(tmp_path):
    prompts, completions = [[1], [1], [2], [1]], [[5, 6], [7], [8, 9], [10]]
    records = [{"p": a, "c": b} for a, b in zip(prompts, completions, strict=True)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = [(each.prompt.tolist(), each.completions) for each in read_groups(tmp_path / "a.jsonl", "p", "c")]
    assert found == [([1], [[5, 6], [7]]), ([2], [[8, 9]]), ([1], [[10]])]


def test_the_command_prices_what_was_accepted(tmp_path):
    record = json.dumps({"prompt_token_ids": PROMPT, "completions": [text(101)]})
    (tmp_path / "a.jsonl").write_text(
        f"{record}\n{json.dumps({'prompt_token_ids': [1], 'completions': [2, 3]})}\n{record}"
    )
    costs = [{"rows": 8, "k": 0, "ms": 4.0}, {"rows": 8, "k": 3, "ms": 5.0}, {"rows": 8, "k": 5, "ms": 9.0}]
    out, file = tmp_path / "out.json", tmp_path / "costs.json"
    for given in (costs, {"shape": "8b", "costs": costs}):
        file.write_text(json.dumps(given))
        assert main([str(tmp_path / "a.jsonl"), "--k", "3", "--costs", str(file), "--json", str(out)]) == 0
        written = json.loads(out.read_text())
        assert written["rows"][0]["tokens_a_step"] == pytest.approx(201 / 126)
        assert [one["k=3"] for one in written["groups"]] == [1.0, 1.0, 4.0]
        (gain,) = written["speed_ups"]
        assert gain["speed_up"] == pytest.approx(201 / 126 * 4 / 5)


def test_a_result_without_costs_is_refused(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt_token_ids": [1], "completions": [[2, 3]]}))
    (tmp_path / "costs.json").write_text(json.dumps({"rows": []}))
    assert main([str(tmp_path / "a.jsonl"), "--costs", str(tmp_path / "costs.json")]) == 1
    assert "no list of costs" in capsys.readouterr().err


def test_the_command_plays_each_drafter(tmp_path):
    record = json.dumps({"prompt_token_ids": PROMPT, "completions": [text(21) * 3]})
    (tmp_path / "a.jsonl").write_text(f"{record}\n{record}")
    costs = ["--cost", "8:0:4", "--cost", "8:3:5"]
    out = tmp_path / "out.json"
    options = ["--k", "3", "1", "--drafter", "ngram", "suffix", "ngram", *costs, "--groups", "--json", str(out)]
    assert main([str(tmp_path / "a.jsonl"), *options]) == 0
    written = json.loads(out.read_text())
    both = [("ngram", 1), ("ngram", 3), ("suffix", 1), ("suffix", 3)]
    for name in ("rows", "sources"):
        assert [(row["drafter"], row["k"]) for row in written[name]] == both
    assert [(one["drafter"], one["group"]) for one in written["groups"]] == [
        *(("ngram", 0), ("ngram", 1)),
        *(("suffix", 0), ("suffix", 1)),
    ]
    for gain, row in zip(written["speed_ups"], (written["rows"][1], written["rows"][3]), strict=True):
        assert gain["drafter"] == row["drafter"] and gain["speed_up"] == pytest.approx(row["tokens_a_step"] * 4 / 5)


def test_lateness_is_of_suffix(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt_token_ids": PROMPT, "completions": [[1, 2, 3]]}))
    for options in (["--late", "0"], [], ["suffix", "--late", "1"]):
        assert main([str(tmp_path / "a.jsonl"), "--drafter", "ngram", *options]) == 0


@pytest.mark.parametrize(
    ("line", "options", "names"),
    [
        ('{"completions": [1]}', [], "prompt_token_ids"),
        ('{"prompt_token_ids": "hello", "completions": [1]}', [], "prompt_token_ids"),
        ('{"prompt_token_ids": [1], "completions": [[1, -2]]}', [], "completions"),
        ("[1]", [], "line 1"),
        ("{", [], "JSON"),
        ('{"prompt_token_ids": [1], "completions": [1, 2]}', ["--cost", "8:3"], "8:3"),
        ('{"prompt_token_ids": [1], "completions": [1, 2]}', ["--cost", "8:3:5.0"], "plain"),
        ('{"prompt_token_ids": [1], "completions": [1, 2]}', ["--k", "0"], "--k"),
        ("", [], "no finished completion"),
        ('{"prompt_token_ids": [1], "completions": []}', [], "no finished completion"),
        (b"\xff\xfe", [], "a.jsonl"),
        ("[" * 100_000, [], "line 1"),
        ('{"prompt_token_ids": [' + "9" * 5000 + '], "completions": [1]}', [], "line 1"),
        ('{"prompt_token_ids": [1], "completions": [[1, 2], {"token_ids": [3]}]}', [], "completions"),
        ('{"prompt_token_ids": [1], "completions": [{"token_ids": [3]}, 4]}', [], "completions"),
        ('{"prompt_token_ids": [1], "completions": [{"tokens": [3]}]}', [], "token_ids"),
        ('{"prompt_token_ids": [1], "completions": [1, 2]}', ["--cost", "8:3:5.0:1"], "8:3:5.0:1"),
        ('{"prompt_token_ids": [1], "completions": [1, 2]}', ["--cost", "8:3:inf"], "positive"),
        ('{"prompt_token_ids": [1], "completions": [1, 2]}', ["--cost", "8:5:1", "--k", "3"], "--k"),
        ('{"prompt_token_ids": [1], "completions": [1, 2]}', ["--cost", "8:0:1", "--cost", "8:0:2"], "8 rows"),
        ('{"prompt_token_ids": [1], "completions": [1, 2]}', ["--costs", "no such file"], "no such file"),
        ('{"prompt_token_ids": [1], "completions": [1, 2]}', ["--kept-tokens", "-1"], "--kept-tokens"),
        ('{"prompt_token_ids": [1], "completions": [1, 2]}', ["--drafter", "ngram", "--late", "1"], "--late"),
    ],
)
def test_unusable_input_is_an_error_that_names_it(tmp_path, capsys, line, options, names):
    (tmp_path / "a.jsonl").write_bytes(line if isinstance(line, bytes) else line.encode())
    assert main([str(tmp_path / "a.jsonl"), *options]) == 1
    assert names in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nothing", "nothing.jsonl"])
def test_a_file_that_is_missing_is_an_error(tmp_path, capsys, name):
    assert main([str(tmp_path / name)]) == 1
    assert name in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_lines_may_be_empty_and_a_file_may_have_a_mark_of_its_encoding(tmp_path):
    record = json.dumps({"prompt_token_ids": PROMPT, "completions": [1, 2, 3]})
    (tmp_path / "a.jsonl").write_text(f"\ufeff{record}\r\n\n{record}\n  \n", encoding="utf-8")
    (found,) = read_groups(tmp_path / "a.jsonl", "prompt_token_ids", "completions")
    assert found.completions == [[1, 2, 3]] * 2


@pytest.mark.parametrize("left", [1, 5, 30])
def test_a_journal_stays_as_it_is(tmp_path, left):
    """Also where its end is torn, and while another reader has it open."""
    path, completions = tmp_path / "journal", [text(9, 1)]
    write_journal(path, completions)
    path.write_bytes(path.read_bytes()[:-left])
    path.chmod(0o400)
    before, other = path.read_bytes(), Journal(path, read_only=True)
    (found,) = read_groups(path, "", "")
    other.close()
    assert found.completions == completions and path.read_bytes() == before


def test_a_journal_that_its_client_has_open_is_an_error(tmp_path, capsys):
    journal = Journal(tmp_path / "journal")
    assert main([str(tmp_path / "journal")]) == 1
    assert "in use" in capsys.readouterr().err
    journal.close()
    (tmp_path / "notes").write_text("nothing of the kind")
    (tmp_path / "empty").touch()
    for name, said in (("notes", "not a journal"), ("empty", "no finished completion")):
        assert main([str(tmp_path / name)]) == 1
        assert said in capsys.readouterr().err
    assert (tmp_path / "notes").read_text() == "nothing of the kind" and not (tmp_path / "empty").read_bytes()


def test_datasets_of_any_format_and_with_parts_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    records = [{"prompt_token_ids": PROMPT, "completions": [1, 2, 3]}, {"prompt_token_ids": [4], "completions": [5, 6]}]
    whole = datasets.Dataset.from_list(records)
    for name, saved in (
        ("numpy", whole.with_format("numpy")),
        ("torch", whole.with_format("torch")),
        ("parts", datasets.DatasetDict(a=whole.select([0]), b=whole.select([1]))),
    ):
        saved.save_to_disk(tmp_path / name)
        found = list(read_groups(tmp_path / name, "prompt_token_ids", "completions"))
        assert [(group.prompt.tolist(), group.completions) for group in found] == [
            (PROMPT, [[1, 2, 3]]),
            ([4], [[5, 6]]),
        ]


@pytest.mark.parametrize("broken", ["state.json", "dataset_info.json", "*.arrow"])
@pytest.mark.parametrize("content", [b"", b"{", None])
def test_a_broken_dataset_is_an_error_that_names_it(tmp_path, capsys, broken, content):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "dataset"
    datasets.Dataset.from_list([{"prompt_token_ids": PROMPT, "completions": [1, 2, 3]}]).save_to_disk(folder)
    (file,) = folder.glob(broken)
    file.unlink() if content is None else file.write_bytes(content)
    capsys.readouterr()
    assert main([str(folder)]) == 1
    assert str(folder) in capsys.readouterr().err
