"""The benchmark of agents that come back: traces, what is counted of them, the floor, and replays on a CPU."""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.bench.agents import serve
from scripts.bench.agents.__main__ import main
from scripts.bench.agents.clients import PageGauge
from scripts.bench.agents.floor import Machine, floor_of
from scripts.bench.agents.loads import LOADS, SCALES, Spread, make_trace
from scripts.bench.agents.report import staleness, timeline
from scripts.bench.agents.trace import (
    Part,
    TraceError,
    Trajectory,
    check_trace,
    count,
    read_trace,
    tokens_of,
    turns,
    write_trace,
)
from scripts.bench.shapes import StepBytes
from tests.support.worker.harness import launch

PAGE = 16
ALONE = Trajectory(0, 0, prompt_len=10, out_lens=(3, 4), obs_lens=(5, 6), tool_times=(0.01, 0.01), system_len=4)
FORK = Trajectory(0, 1, prompt_len=10, out_lens=(2,), obs_lens=(), system_len=4, fork=(0, 0))
CUT = Trajectory(0, 2, prompt_len=10, out_lens=(3, 4), obs_lens=(5,), system_len=4, compact=((1, 14),))


def lengths(trace: list[Trajectory], name: str) -> list[int]:
    return [length for one in trace for length in getattr(one, name)]


# --- traces -----------------------------------------------------------------------------------------------------------


def test_a_load_is_the_same_for_the_same_seed_and_begins_as_a_larger_one() -> None:
    some = {"streams": 4, "forks": 0.5, "compact": 0.5}
    trace = make_trace(LOADS["long"], 7, **some)
    assert trace == make_trace(LOADS["long"], 7, **some)
    assert trace[:12] == make_trace(LOADS["long"], 7, trajectories=12, **some)
    assert trace != make_trace(LOADS["long"], 8, **some)
    check_trace(trace)


def test_short_agents_have_the_stated_lengths() -> None:
    trace = make_trace(LOADS["short"], 0)
    counted = count(trace)
    assert len(trace) == 96 and {len(one.out_lens) for one in trace} == {8}
    assert {one.system_len for one in trace} == {1500}
    assert all(300 <= one.prompt_len - 1500 <= 1500 for one in trace)
    assert np.median(lengths(trace, "out_lens")) == pytest.approx(350, rel=0.1)
    assert min(lengths(trace, "out_lens")) >= 60 and max(lengths(trace, "out_lens")) <= 2000
    assert min(lengths(trace, "obs_lens")) >= 200 and max(lengths(trace, "obs_lens")) <= 1400
    times = lengths(trace, "tool_times")
    assert np.mean(times) == pytest.approx(2, rel=0.1) and min(times) >= 0.2 and max(times) <= 12
    assert counted.drawn == pytest.approx(360_000, rel=0.05) and counted.sent == pytest.approx(5.27e6, rel=0.05)
    assert counted.distinct == pytest.approx(618_000, rel=0.05)


@pytest.mark.parametrize(("name", "most"), [("long", 80_000), ("very_long", 180_000)])
def test_long_agents_have_the_stated_medians(name: str, most: int) -> None:
    trace = make_trace(LOADS[name], 0, trajectories=200)
    assert np.median([len(one.out_lens) for one in trace]) == pytest.approx(LOADS[name].turns.median, rel=0.15)
    times = lengths(trace, "tool_times")
    assert np.median(times) == pytest.approx(5.2, rel=0.1) and np.quantile(times, 0.99) == pytest.approx(81, rel=0.15)
    contexts = [tokens_of(turn.prompt) + turn.trajectory.out_lens[turn.number] for turn in turns(trace)]
    assert min(contexts) > 11_000 and 0.95 * most < max(contexts) <= most
    counted = count(trace)
    assert 0.94 < 1 - counted.distinct / counted.sent < 0.975


def test_a_small_load_is_the_same_with_shorter_lengths() -> None:
    small = make_trace(LOADS["short"].scaled(SCALES["small"]), 0)
    assert len(small) == 8 and {len(one.out_lens) for one in small} == {8}
    whole = make_trace(LOADS["short"], 0)[:8]
    ratio = np.array(lengths(small, "out_lens")) / np.array(lengths(whole, "out_lens"))
    assert np.median(ratio) == pytest.approx(1 / 8, rel=0.05)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = [ALONE, FORK, CUT]
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace


def test_a_line_with_the_six_fields_alone_is_a_trace(tmp_path: Path) -> None:
    line = {"group": 0, "stream": 0, "prompt_len": 7570, "out_lens": [399, 65], "obs_lens": [23, 942]}
    (tmp_path / "trace.jsonl").write_text(json.dumps(line) + "\n")
    (read,) = read_trace(tmp_path / "trace.jsonl")
    assert (read.system_len, read.fork, read.compact, read.tool_s(0)) == (0, None, (), 0.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt_len": "7"}, "prompt_len"),
        ({"prompt_len": 0}, "prompt_len"),
        ({"out_lens": []}, "out_lens"),
        ({"out_lens": [3, 0]}, "out_lens"),
        ({"out_lens": [3, True]}, "out_lens"),
        ({"obs_lens": [3, 3, 3]}, "obs_lens"),
        ({"tool_times": [-1.0, 0.0]}, "tool_times"),
        ({"tool_times": 4}, "tool_times"),
        ({"system_len": 11}, "system_len"),
        ({"compact": [[1, 9]]}, "compact"),
        ({"compact": [[2, 12]]}, "compact"),
        ({"compact": [1, 12]}, "compact"),
        ({"fork": [0, 0]}, "fork"),
        ({"forks": [0, 0]}, "forks"),
        ({"group": None}, "group"),
    ],
)
def test_a_wrong_line_is_an_error_that_names_the_line_or_group_and_the_field(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    line = {"group": 0, "stream": 0, "prompt_len": 10, "out_lens": [3, 4], "obs_lens": [5, 6]}
    (tmp_path / "trace.jsonl").write_text(json.dumps(line | change))
    with pytest.raises(TraceError, match=rf"(line 1|group 0).*\b{named}\b"):
        read_trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (replace(ALONE, prompt_len=11, stream=1), "prompt_len"),
        (replace(ALONE, system_len=3, stream=1), "system_len"),
        (ALONE, "two of them"),
        (replace(FORK, fork=(0, 2)), "fork"),
        (replace(FORK, fork=(5, 0)), "fork"),
    ],
)
def test_lines_that_contradict_each_other_are_an_error(other: Trajectory, named: str) -> None:
    with pytest.raises(TraceError, match=named):
        check_trace([ALONE, other])


# --- histories --------------------------------------------------------------------------------------------------------


def test_a_prompt_has_the_history_a_fork_that_of_its_parent_and_a_cut_one_its_beginning_and_its_end() -> None:
    system, task = Part(("system",), 4), Part(("task", 0), 6)
    drawn, tool = Part(("drawn", 0, 0, 0), 3), Part(("tool", 0, 0, 0), 5)
    prompts = {(*turn.trajectory.name, turn.number): turn.prompt for turn in turns([ALONE, FORK, CUT])}
    assert prompts == {
        (0, 0, 0): (system, task),
        (0, 0, 1): (system, task, drawn, tool),
        (0, 1, 0): (system, task, drawn, tool),
        (0, 2, 0): (system, task),
        (0, 2, 1): (system, task, Part(("tool", 0, 2, 0), 4, 1)),
    }


def by_hand(trace: list[Trajectory]) -> tuple[int, int, int]:
    """Tokens sent, distinct and drawn, with every prefix of every prompt as a set of tuples."""
    texts: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    known: set[tuple[Any, ...]] = set()
    sent = distinct = drawn = 0
    for turn in turns(trace):
        text = [token for part in turn.prompt for token in _tokens(part)]
        sent += len(text)
        for end in range(1, len(text) + 1):
            distinct += (prefix := tuple(text[:end])) not in known
            known.add(prefix)
        out = [("drawn", *turn.trajectory.name, turn.number, i) for i in range(turn.trajectory.out_lens[turn.number])]
        drawn += len(out)
        known |= {tuple(text + out[:end]) for end in range(1, len(out) + 1)}
        texts[(*turn.trajectory.name, turn.number)] = text
    return sent, distinct, drawn


def _tokens(part: Part) -> list[tuple[Any, ...]]:
    return [(*part.source, part.begin + i) for i in range(part.length)]


def test_tokens_are_counted_as_by_hand_also_of_forks_and_cut_histories() -> None:
    counted = count([ALONE, FORK, CUT])
    assert (counted.sent, counted.drawn) == (10 + 18 + 18 + 10 + 14, 3 + 4 + 2 + 3 + 4)
    assert counted.distinct == 10 + 5 + 4, "the prompt once, one answer for parent and fork, the end of the cut history"
    load = replace(LOADS["short"].scaled(SCALES["small"]), system=40, task=LOADS["short"].turns)
    trace = make_trace(load, 3, streams=4, most_turns=4, forks=0.7, compact=0.6)
    assert any(one.fork for one in trace) and any(one.compact for one in trace)
    counted = count(trace)
    assert (counted.sent, counted.distinct, counted.drawn) == by_hand(trace)
    assert counted.held == counted.distinct + counted.drawn


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_floor_has_weights_and_kv_once_a_step_prompts_once_and_the_tools() -> None:
    need, machine = StepBytes(weights=1000, kv_per_token=10), Machine(bytes_per_s=1e4, flops=1e4)
    one = floor_of([ALONE], 1, need, machine)
    # 10 + 5 new tokens of prompts, 1,000 operations each; the first token of a turn comes with its prompt
    assert one.prompts_s == pytest.approx(15 * 0.1)
    contexts = [11, 12, 19, 20, 21]
    assert one.steps == 5 and one.decode_s == pytest.approx((5 * 1000 + 10 * sum(contexts)) / 1e4)
    assert one.total_s == pytest.approx(one.prompts_s + one.decode_s + 0.01)
    twins = [ALONE, replace(ALONE, stream=1)]
    two = floor_of(twins, 2, need, machine)
    assert two.prompts_s == pytest.approx((10 + 5 + 5) * 0.1), "the prompt of a group is computed once"
    assert two.total_s < 2 * one.total_s and floor_of(twins, 1, need, machine).total_s > two.total_s
    forked = floor_of([ALONE, FORK, CUT], 3, need, machine)
    assert forked.prompts_s == pytest.approx((10 + 5 + 4) * 0.1)


def test_a_timeline_has_the_mean_of_each_tenth() -> None:
    assert timeline([(0.5, 4), (0.7, 2), (9.9, 1), (10.0, 3), (12.0, 9)], 10.0) == [3.0, *[None] * 8, 2.0]


def test_staleness_is_weighed_by_tokens() -> None:
    assert staleness([(0, 30), (2, 10), (0, 60)]) == {"mean": 0.2, "most": 2, "pct": {"0": 90.0, "2": 10.0}}
    assert staleness([]) == {}


VLLM_PAGE = b"""# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="toy"} 900.0
vllm:prefix_cache_queries_total{engine="1",model_name="toy"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="toy"} 600.0
vllm:prefix_cache_hits_total{engine="1",model_name="toy"} 50.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="toy"} 1e+02
vllm:num_requests_running{engine="0",model_name="toy"} 3.0
"""


def test_figures_of_vllm_come_from_its_page() -> None:
    pages = iter([VLLM_PAGE, b"up 1\n"])

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(next(pages))

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        gauge = PageGauge(f"http://127.0.0.1:{server.server_port}")
        found = asyncio.run(gauge.settled())
        assert (found.computed, found.known, found.running) == (250, 750, 3)
        with pytest.raises(RuntimeError, match="--workers"):
            asyncio.run(gauge.now())
    finally:
        server.shutdown()
        server.server_close()


# --- replays ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    return serve.checkpoint("toy", tmp_path_factory.mktemp("toy") / "toy", 4096)


@pytest.fixture(scope="module")
def endpoint(folder: Path) -> Iterator[str]:
    """One worker as the benchmark starts it, but forked."""
    with launch(folder, log=folder / "log", **serve.worker_flags("cpu", 8, 4096, 600)) as worker:
        yield worker.endpoint


@pytest.fixture(scope="module")
def endpoints(folder: Path) -> Iterator[list[str]]:
    """Two workers as the benchmark starts them."""
    with serve.workers(folder, 2, "cpu", rows=8, context=4096, pages=600, more={}) as workers:
        yield [worker.endpoint for worker in workers]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    load = replace(LOADS["short"].scaled(SCALES["small"]), tool_s=Spread(0.0, 0.05))
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, make_trace(load, 3, streams=4, most_turns=4, forks=0.7, compact=0.6))
    return path


SEEDS = itertools.count(100, 10)


def replayed(trace: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    """The rows of a replay with tokens that the workers have not seen."""
    more = ["--model", "tiny", "--device", "cpu", "--seed", str(next(SEEDS)), "--out", str(out), *flags]
    assert main(["--trace", str(trace), *more]) == 0
    return json.loads(out.read_text())["rows"]


def check_counts(row: dict[str, Any], path: Path) -> None:
    """All that can be known of a replay beforehand, and that the engine's own counts agree."""
    planned, counted = read_trace(path), count(read_trace(path))
    assert row["trajectories"] == len(planned)
    assert row["turns"] == sum(len(one.out_lens) for one in planned)
    assert row["forks"] == sum(one.fork is not None for one in planned) > 0
    assert row["cuts"] == sum(len(one.compact) for one in planned) > 0
    assert row["drawn_tokens"] == counted.drawn
    assert row["sent_prompt_tokens"] == counted.sent
    assert row["distinct_prompt_tokens"] == counted.distinct
    assert row["preemptions"] == 0
    assert row["computed_prompt_tokens"] + row["known_prompt_tokens"] == counted.sent
    assert 0 < row["first_token_s"]["median"] <= row["turn_s"]["median"] <= row["turn_s"]["p99"] <= row["total_s"]


def test_a_replay_adds_up_and_a_pool_for_all_computes_little_again(endpoint: str, trace: Path, tmp_path: Path) -> None:
    rows = replayed(trace, tmp_path / "out.json", "--workers", endpoint, "--requests", "plain", "sessions")
    assert [row["requests"] for row in rows] == ["plain", "sessions"]
    for row in rows:
        check_counts(row, trace)
        assert 0 < row["active_pct"] <= 100.5
        assert row["staleness"] == {"mean": 0.0, "most": 0, "pct": {"0": 100.0}}
    again = rows[0]["computed_prompt_tokens"] - rows[0]["distinct_prompt_tokens"]
    assert 0 <= again <= 2 * PAGE * rows[0]["turns"]
    assert rows[1]["kv_at_the_end"]["sessions"]["turns"] > 0 and rows[1]["kv_most"]["pages"]["total"] > 500


@pytest.mark.nightly
def test_the_gateway_replays_the_same(endpoints: list[str], trace: Path, tmp_path: Path) -> None:
    (row,) = replayed(trace, tmp_path / "out.json", "--workers", endpoints[0], "--gateway")
    check_counts(row, trace)
    assert row["engine"] == "http"


@pytest.mark.nightly
def test_two_workers_know_more_where_the_client_knows_where_kv_is(
    endpoints: list[str], trace: Path, tmp_path: Path
) -> None:
    flags = ("--workers", ",".join(endpoints), "--route", "prefix", "round-robin")
    prefix, in_turn = replayed(trace, tmp_path / "out.json", *flags)
    for row in (prefix, in_turn):
        check_counts(row, trace)
        assert row["workers"] == 2
    assert prefix["known_prompt_tokens"] > in_turn["known_prompt_tokens"]


@pytest.mark.nightly  # a trainer is one more process that imports torch
def test_updates_come_while_agents_run_and_tokens_tell_their_age(
    endpoints: list[str], trace: Path, tmp_path: Path
) -> None:
    flags = ("--workers", endpoints[1], "--update-every", "0.3", "--agents", "2")
    (row,) = replayed(trace, tmp_path / "out.json", *flags)
    check_counts(row, trace)
    assert row["updates"] > 0 and row["update_s"]["median"] > 0
    assert row["staleness"]["most"] > 0 and sum(row["staleness"]["pct"].values()) == pytest.approx(100, abs=0.1)


def test_a_time_limit_ends_a_replay_early_also_while_tools_run(endpoint: str, trace: Path, tmp_path: Path) -> None:
    several = [one for one in read_trace(trace) if len(one.out_lens) > 1]
    slow = [replace(one, fork=None, tool_times=(3600.0,) * len(one.out_lens)) for one in several]
    assert len(slow) > 2
    write_trace(tmp_path / "slow.jsonl", slow)
    flags = ("--workers", endpoint, "--seconds", "2", "--agents", "2")
    (row,) = replayed(tmp_path / "slow.jsonl", tmp_path / "out.json", *flags)
    assert (row["turns"], row["trajectories"]) == (2, 0), "an agent that waits for its tool takes no other trajectory"
    assert row["computed_prompt_tokens"] + row["known_prompt_tokens"] == row["sent_prompt_tokens"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--url", "http://127.0.0.1:1", "--gateway"),
        ("--url", "http://127.0.0.1:1", "--update-every", "1"),
        ("--route", "round-robin", "--requests", "sessions"),
        ("--forks", "0.5"),
        ("--bandwidth", "4.69", "--seconds", "9"),
        ("--model", "no-such-shape"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
