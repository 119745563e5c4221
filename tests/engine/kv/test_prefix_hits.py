"""What `status` says of known prefixes: how many rows found one, and where."""

import functools
from typing import Any

import pytest
import torch

from rollout.engine.inspect import Inspector
from tests.support.engine.harness import Bench, load
from tests.support.engine.harness import prompt_of as any_prompt
from tests.support.models.families import make_checkpoint
from tests.support.models.hybrids import make_hybrid

VOCAB = 83
prompt_of = functools.partial(any_prompt, vocab=VOCAB)
IN_SESSION: dict[str, Any] = {"session": ("c", "s"), "session_lease_s": 100.0}


@pytest.fixture(scope="module", params=["attention", "linear attention"])
def model(request, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "attention":
        make_checkpoint("olmoe", folder)
    else:
        make_hybrid("Qwen3_5", folder, 0)
    return load(folder)


def test_a_hit_is_counted_where_it_was_found(model) -> None:
    """Pages of 4: full ones are found by attention alone, since a state cannot be cut."""
    states = bool(model.spec.state_layers)
    bench = Bench(model, page_size=4, kv_pages=400)
    base, before = prompt_of(22), dict.fromkeys(("group", "pages", "prompt_end", "turn_end"), 0)

    def ask(name: str, prompt: list[int], **options: Any) -> dict[str, int]:
        """What one more request adds to the counts."""
        bench.complete(name, prompt, 6, **options)
        now = dict(bench.status().prefix_hits)
        added = {kind: now[kind] - count for kind, count in before.items()}
        before.update(now)
        return {kind: count for kind, count in added.items() if count}

    assert ask("first", base) == {}
    assert ask("equal", base) == {"prompt_end": 1}
    assert ask("longer", base + prompt_of(9, 1)) == ({"prompt_end": 1} if states else {"pages": 1})
    assert ask("cut", base[:14]) == ({} if states else {"pages": 1})
    assert ask("group", prompt_of(17, 2), n=4) == {"group": 3}
    assert ask("turn 1", prompt_of(10, 3), **IN_SESSION) == {}
    said = prompt_of(10, 3) + bench.tokens("turn 1")
    assert ask("turn 2", said + prompt_of(5, 4), **IN_SESSION) == {"turn_end": 1}
    assert ask("other", prompt_of(30, 5)) == {}
    Inspector(bench.engine).set_gauges()
    report = bench.engine.meter.report()
    assert {kind: report[f"prefix/hits_{kind}"] for kind in before} == before


def test_a_preempted_row_counts_each_time_it_finds_a_prefix(model) -> None:
    """The counts are of rows that begin, as the share of cached prompt tokens is."""
    bench = Bench(model, page_size=4, kv_pages=26, max_rows=3)
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(12, i), 40)
    bench.run()
    counters = bench.engine.roster.counters
    assert counters.preemptions > 0
    assert (sum(counters.prefix_hits.values()) > 0) == (counters.cached_tokens > 0)
    assert set(counters.prefix_hits) <= {"pages", "prompt_end"}


@pytest.mark.parametrize("tokens", [7, 8, 9])
def test_the_next_turn_finds_all_positions_before_the_last_token(model, tokens) -> None:
    """Positions before the last token have KV: 39, 40 and 41."""
    bench = Bench(model, page_size=4, kv_pages=400)
    bench.complete("turn 1", prompt_of(33), tokens)
    bench.complete("turn 2", prompt_of(33) + bench.tokens("turn 1") + prompt_of(5, 1), 2)
    if not model.spec.state_layers:
        assert bench.done["turn 2"].cached_tokens == 32 + tokens
