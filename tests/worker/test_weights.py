"""New weights for a real worker while it generates: every token comes from the version stamped on it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.worker.harness import kill_publisher_half_way, launch, tensors, until
from tests.support.worker.served import Served
from trainer_bridge.client.blocking import Stream
from trainer_bridge.client.launch import WorkerProcess
from trainer_bridge.publish.publisher import WeightPublisher
from trainer_bridge.wire.errors import WeightsRejected, WeightsReplaced

ENDLESS = {"max_tokens": 30_000, "stream": "tokens", "stream_every": 8}


@pytest.fixture(scope="module")
def book(second_worker: WorkerProcess, ledger: dict[int, int]) -> Iterator[Served]:
    served = Served(second_worker, ledger)
    yield served
    served.close()


@pytest.fixture
def served(book: Served, weights_worker: WorkerProcess) -> Iterator[Served]:
    """The second worker, counting in ones."""
    if book.steps[max(book.steps)] != 1:
        book.publish(1)
    yield book


@pytest.mark.parametrize("transport", ["shm", "zmq", "nccl", "disk"])
def test_completions_change_step_where_their_versions_say(served: Served, transport: str, tmp_path: Path) -> None:
    old = served.version
    folder = str(tmp_path) if transport == "disk" else None
    with (
        WeightPublisher(served.endpoint, transport=transport, folder=folder) as publisher,
        served.client.generate("17:", n=3, **ENDLESS) as stream,
        served.client.generate("480:", n=2, max_tokens=30_000, temperature=0, stream="completions") as greedy,
    ):
        begun: set[int] = set()  # each has a token of the old version
        while len(begun) < 3:
            begun.add(next(stream).index)
        until(lambda: served.client.status()["rows"]["running"] == 5, "the greedy completions")
        ahead = served.client.status()["tokens"]
        until(lambda: served.client.status()["tokens"] > ahead + 100, "tokens of all of them")
        report = served.publish(2, publisher)
        for chunk in stream:
            if chunk.part.versions[-1][0] == report.version:
                break
        stream.cancel()
        greedy.cancel()
        results = stream.wait().completions, greedy.wait().completions
    served.check("17:", results[0])
    served.check("480:", results[1])
    for completion in results[0] + results[1]:
        assert [version for version, _ in completion.versions] == [old, report.version]
        assert completion.finish_reason == "cancelled"
    assert served.counts_in() == 2
    assert report.transport == transport and report.nbytes == sum(t.nbytes for t in tensors(2).values())
    assert 0 < report.pause_s < report.seconds and report.phases.keys() == {"receive", "verify", "wait", "apply"}
    (status,) = served.publisher.status()
    assert (status["state"], status["version"], status["last"]["version"]) == ("idle", report.version, report.version)
    told = served.client.status()["weights"]
    assert (told["version"], told["apply"], told["staging"]) == (report.version, "staged", "host")
    assert told["last"]["version"] == report.version
    assert (told["last"]["transport"], told["last"]["bytes"]) == (transport, report.nbytes)
    assert told["last"]["phases_ms"] == pytest.approx({name: 1e3 * s for name, s in report.phases.items()})
    assert 0 <= told["last"]["age_s"] < 60 and told["last"]["at_s"] == pytest.approx(time.time(), abs=60)


def test_ten_swaps_in_one_completion(served: Served) -> None:
    first = served.version
    with served.client.generate("17:", n=2, **ENDLESS) as stream:
        begun: set[int] = set()  # each has a token of the first version
        while len(begun) < 2:
            begun.add(next(stream).index)
        for i in range(10):
            report = served.publish(2 - i % 2)
            while next(stream).part.versions[-1][0] != report.version:
                pass
        stream.cancel()
        completions = stream.wait().completions
    served.check("17:", completions)
    for completion in completions:
        assert [version for version, _ in completion.versions] == list(range(first, first + 11))


def test_tokens_name_their_version_over_updates_that_send_changes(served: Served) -> None:
    with (
        WeightPublisher(served.endpoint, transport="zmq", deltas="host") as publisher,
        served.client.generate("17:", n=2, **ENDLESS) as stream,
    ):
        begun: set[int] = set()
        while len(begun) < 2:
            begun.add(next(stream).index)
        sent = []
        for i in range(6):
            report = served.publish(2 - i % 2, publisher)
            sent.append(report.sent_nbytes / report.nbytes)
            while next(stream).part.versions[-1][0] != report.version:
                pass
        stream.cancel()
        completions = stream.wait().completions
    served.check("17:", completions)
    assert sent[0] == 1 and max(sent[1:]) < 1
    assert all(len(completion.versions) == 7 for completion in completions)


def test_a_completion_ends_rather_than_span_more_versions_than_asked_for(served: Served) -> None:
    first = served.version
    with (
        served.client.generate("17:", max_version_span=1, **ENDLESS) as bound,
        served.client.generate("17:", **ENDLESS) as free,
    ):
        for i in range(3):
            next(bound)
            while next(free).part.versions[-1][0] != first + i:
                pass
            if i < 2:
                served.publish(2 - i)
        free.cancel()
        (ended,), (other,) = bound.wait().completions, free.wait().completions
    served.check("17:", [ended, other])
    assert ended.finish_reason == "stale" and {version for version, _ in ended.versions} == {first, first + 1}
    assert other.versions[1] == ended.versions[1], "no token that fits is lost"
    prior = {"token_ids": ended.token_ids.tolist(), "seed": ended.seed, "versions": ended.versions}
    (again,) = served.client.generate("17:", max_tokens=30_000, continue_from=prior, max_version_span=1).completions
    assert again.finish_reason == "stale" and len(again) == len(ended)


def test_weights_come_to_a_paused_worker(served: Served) -> None:
    with served.client.generate("17:", max_tokens=30_000, stream="tokens", stream_every=1) as stream:
        next(stream)
        served.client.pause()
        report = served.publish(2)
        assert served.client.status()["state"] == "paused"
        served.client.resume()
        while next(stream).part.versions[-1][0] != report.version:
            pass
        stream.cancel()
        (completion,) = stream.wait().completions
    served.check("17:", [completion])
    assert completion.versions[-1][0] == report.version and len(completion.versions) == 2


def test_a_prompt_that_was_cached_under_old_weights_is_computed_again(served: Served) -> None:
    prompt = " ".join(map(str, range(200, 240))) + ":"
    for expected in (0, 159):
        result = served.client.generate(prompt, max_tokens=30)
        assert result.cached_tokens == pytest.approx(expected, abs=16)
    served.publish(2)
    result = served.client.generate(prompt, max_tokens=30)
    assert result.cached_tokens == 0
    served.check(prompt, result.completions)


def spoiled(kind: str) -> tuple[dict[str, torch.Tensor], str]:
    """Weights that the worker must refuse, and what its refusal names."""
    wrong = tensors(2)
    name = "model.layers.1.mlp.up_proj.weight"
    if kind == "missing":
        del wrong[name]
    elif kind == "shape":
        wrong[name] = wrong[name][:-1].clone()
    elif kind == "unknown":
        wrong["model.layers.2.mlp.up_proj.weight"] = wrong[name]
        name = "model.layers.2"
    return wrong, "version" if kind == "stale" else name


@pytest.mark.parametrize("transport", ["zmq", "disk"])
@pytest.mark.parametrize("kind", ["missing", "shape", "unknown", "stale"])
def test_wrong_weights_are_refused_and_the_old_ones_serve_on(
    served: Served, kind: str, transport: str, tmp_path: Path
) -> None:
    old = served.version
    wrong, named = spoiled(kind)
    folder = str(tmp_path) if transport == "disk" else None
    with (
        WeightPublisher(served.endpoint, transport=transport, folder=folder) as publisher,
        served.client.generate("17:", n=2, max_tokens=30_000, stream="tokens", stream_every=8) as stream,
    ):
        next(stream)
        handle = publisher.publish(wrong, old if kind == "stale" else old + 1)
        with pytest.raises(WeightsRejected) as caught:
            handle.applied(60)
        assert named in str(caught.value) and served.endpoint in str(caught.value)
        next(stream)
        stream.cancel()
        completions = stream.wait().completions
    served.check("17:", completions)
    assert all([version for version, _ in completion.versions] == [old] for completion in completions)
    assert served.version == old and served.counts_in() == 1
    assert served.publisher.status()[0]["state"] == "idle"


def test_a_publisher_that_is_killed_half_way_leaves_the_old_weights(served: Served) -> None:
    old = served.version
    begun: list[Stream] = []  # amid the update: its process may take long to start

    def begin() -> None:
        begun.append(served.client.generate("17:", n=2, **ENDLESS))
        next(begun[0])

    receiving = kill_publisher_half_way(served.endpoint, old + 1, begin)
    with begun[0] as stream:
        incoming = receiving["incoming"]
        assert receiving["state"] == "receiving" and receiving["version"] == old
        assert incoming["version"] == old + 1 and 0 < incoming["arrived_bytes"] < incoming["total_bytes"]
        assert served.counts_in() == 1 and served.version == old
        report = served.publish(2)  # the same version number: it was never used
        assert report.version == old + 1
        while next(stream).part.versions[-1][0] != report.version:
            pass
        stream.cancel()
        completions = stream.wait().completions
    served.check("17:", completions)
    assert all([version for version, _ in c.versions] == [old, old + 1] for c in completions)


# --- a worker with other settings ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Computes the KV again after a swap, has few pages, and forgets half-sent updates quickly."""
    log = tmp_path_factory.mktemp("tight") / "worker.log"
    settings = {"kv_on_swap": "recompute", "recompute_fraction": 1e-3}
    with launch(log=log, max_rows=4, kv_pages=80, idle_s=15.0, **settings) as worker:
        served = Served(worker, {0: 1})
        yield served
        served.close()


def test_recomputed_kv_and_preempted_rows_count_right_across_a_swap(tight: Served) -> None:
    """Four rows of up to 600 tokens want 152 pages of 16; there are 79. The others make it last for some seconds."""
    with tight.client.generate("17:", n=10, max_tokens=600, stream="tokens", stream_every=4) as stream:
        while sum(len(part) for part in stream.partials()) < 400:
            next(stream)
        report = tight.publish(2)
        result = stream.wait()
    tight.check("17:", result.completions)
    assert result.preemptions > 0
    for completion in result.completions:
        assert len(completion) == 600 and completion.finish_reason == "length"
    both = [completion for completion in result.completions if len(completion.versions) == 2]
    assert both and all((c.versions[0][1], report.version) in c.recomputed for c in both)
    assert tight.version == report.version and tight.counts_in() == 2


@pytest.mark.nightly
def test_an_update_waits_for_recomputation_until_a_newer_one_takes_its_place_or_no_row_runs(tight: Served) -> None:
    """Computing KV again may take a thousandth of the time, so the second update waits as long as rows run."""
    with tight.client.generate("17:", n=400, max_tokens=250, stream="tokens", stream_every=4) as stream:
        while sum(len(part) for part in stream.partials()) < 100:
            next(stream)
        first = tight.publish(2)
        version, step = first.version, {first.version + 1: 1, first.version + 2: 1}
        older = tight.publisher.publish(tensors(1), version + 1)
        until(lambda: tight.publisher.status()[0]["waits_for"] == "recompute", "the wait")
        newer = tight.publisher.publish(tensors(1), version + 2)
        with pytest.raises(WeightsReplaced):
            older.applied(60)
        assert tight.version == version
        stream.cancel()
        completions = stream.wait().completions
        newer.applied(60)
    tight.steps.update(step)
    tight.check("17:", completions)
    assert {completion.finish_reason for completion in completions} >= {"cancelled"}
    assert max(at for completion in completions for at, _ in completion.versions) == version
    assert tight.version == version + 2 and tight.counts_in() == 1


@pytest.mark.nightly
def test_a_half_sent_update_is_forgotten_after_a_while(tight: Served) -> None:
    version = tight.version
    kill_publisher_half_way(tight.endpoint, version + 1)
    until(lambda: tight.publisher.status()[0]["state"] == "idle", "the update to be dropped")
    assert tight.version == version and tight.counts_in() == tight.steps[version]
    tight.publish(1)
    assert tight.counts_in() == 1


def test_a_session_keeps_its_kv_over_an_update_and_the_client_is_told(tmp_path: Path) -> None:
    with launch(log=tmp_path / "worker.log", max_kv_age=1) as worker:
        served = Served(worker, {0: 1})
        turn = {"temperature": 0, "session": "s"}
        first = served.client.generate("17:", max_tokens=40, return_prompt_ids=True, **turn)
        said = [*first.prompt_token_ids, *first.completions[0].token_ids]
        assert first.completions[0].kv_versions == []
        version, known = served.publish(2).version, len(said) - 1
        with served.client.generate(said, max_tokens=9, stream="tokens", stream_every=2, **turn) as stream:
            told = [chunk.part.kv_versions for chunk in stream]
            second = stream.wait()
        assert told[0] == second.completions[0].kv_versions == [(0, 0, known)] and not any(told[1:])
        assert second.cached_tokens == known and second.completions[0].versions == [(version, 9)]
        newest = served.client.generate(said, max_tokens=9, max_kv_age=0, **turn)
        assert newest.completions[0].kv_versions == [] and newest.cached_tokens == 0
        again = served.client.generate(said, max_tokens=9, **turn)
        assert again.completions[0].kv_versions == [(0, version, known)]
        served.close()
