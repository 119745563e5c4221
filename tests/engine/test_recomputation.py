"""Updates under `recompute` that come faster than prompts are computed: rows decode all the same, no update starves."""

import random

import pytest

from rollout.engine.build import rebuild_engine
from rollout.engine.messages.to_engine import Cancel, FeatureUpdate, Pause, PutAdapter, Resume, Shutdown
from rollout.engine.sequence.sequence import SequenceState
from tests.support.engine.adapted import make_adapters
from tests.support.engine.harness import Bench, load, watch_prefills
from tests.support.engine.replay import replayed
from tests.support.engine.streams import SteppedDevice, random_delays
from tests.support.engine.updates import Endless, Mailbox, Update
from tests.support.kernels.grids import checkered, nightly


class Turns(dict):
    """The model of each version, where versions take turns."""

    def __init__(self, models) -> None:
        self._models = models

    def __missing__(self, version: int):
        return self._models[version % len(self._models)]


@pytest.fixture
def sources(folders):
    return [load(folder) for folder in folders]


def recomputing(model, receiver, fraction: float = 0.5, **engine) -> Bench:
    """An engine whose steps take one second each, for the share of time that `recompute_fraction` bounds."""
    device = SteppedDevice()
    settings = {"prefill_chunk_tokens": 16, "kv_on_swap": "recompute", "recompute_fraction": fraction, **engine}
    bench = Bench(model, device, receiver, clock=lambda: device.now_s, **settings)
    receiver.bench = bench
    bench.engine.recomputation.begin([])
    return bench


MOST_TICKS = 5_000  # a row that starves takes more


def tick(bench: Bench, count: int) -> None:
    bench.ticks(count)


def until_all_decode(bench: Bench, rows: int) -> None:
    while len(bench.engine.roster.decoding) < rows or bench.engine.recomputation.delays(bench.engine.roster):
        bench.engine.tick()


def swap_under_way(bench: Bench, mailbox: Mailbox, update: Update) -> None:
    """Apply an update and go on until a row of it is half computed."""
    mailbox.ready = update
    while mailbox.ready is not None or not any(seq.kv.length for seq in bench.engine.roster.prefilling):
        bench.engine.tick()
    assert mailbox.done[-1][0] == update.version


# --- how much is computed again ---


@pytest.mark.parametrize(("n", "chunk"), checkered([2, 8], [8, 64, 2048]))
def test_a_groups_prompt_is_computed_again_once(model, sources, prompt_of, n, chunk):
    mailbox = Mailbox()
    bench = Bench(model, None, mailbox, kv_on_swap="recompute", prefill_chunk_tokens=chunk)
    bench.submit("g", prompt_of(60), 60, n=n, sampling={"temperature": 1.0, "seed": 3})
    tick(bench, 30)
    sizes = watch_prefills(bench)
    mailbox.ready = Update(1, sources[1], model)
    bench.run()
    drawn = [bench.completions["g", i].versions.index(1) for i in range(n)]
    assert sum(sizes) == 60 + sum(drawn), "the prompt ends with a page, so members compute only what they drew"


def test_without_the_limit_endless_updates_let_no_row_decode(model, sources, prompt_of):
    """What the limit is for: at 1.0 rows get a token only where an update happens to come after a prefill."""
    bench = recomputing(model, Endless(sources, model), 1.0)
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(40, i), 30)
    tick(bench, 150)
    assert bench.engine.roster.counters.tokens < 10
    bench.engine.swapper.fail("the test is over")
    bench.close(check=False)


@pytest.mark.parametrize("fraction", [0.3, *nightly(0.5, 0.8)])
def test_endless_updates_leave_the_rest_of_the_time_to_decoding(model, sources, prompt_of, hf_models, fraction):
    receiver = Endless(sources, model)
    bench = recomputing(model, receiver, fraction, kv_pages=400)
    device, meter = bench.device, bench.engine.meter
    for i in range(6):
        bench.submit(f"r{i}", prompt_of(40, i), 150)
    bench.run(MOST_TICKS)
    assert receiver.version >= 3, "no update starves"
    spent_s = meter.report()["weights/recompute_s"]
    last_s = 6 * 190 / 16 + 6  # the most that the last update costs, which nothing follows
    assert 0 < spent_s <= fraction * device.now_s + last_s
    for i in range(6):
        completion = bench.completions[f"r{i}", 0]
        assert len(completion.token_ids) == 150
        assert replayed(Turns(hf_models), prompt_of(40, i), completion) == completion.token_ids


# --- when the next update is applied ---


def test_no_update_is_left_waiting_when_the_engine_has_nothing_to_do(model, sources, prompt_of):
    """A row may end with the token that its recomputed prefill draws, and nothing comes after that."""
    for ticks in range(14):
        mailbox = Mailbox()
        bench = recomputing(model, mailbox, 0.01, pipeline_depth=2)
        bench.submit("r", prompt_of(20), 8)
        tick(bench, ticks)
        mailbox.ready = Update(1, sources[1], model)
        while mailbox.ready is not None:
            bench.engine.tick()
        mailbox.ready = Update(2, sources[0], model)
        while bench.engine.busy:
            bench.engine.tick()
        assert mailbox.ready is None, f"after {ticks} ticks"
        bench.close()


@pytest.mark.parametrize("arrivals", [3, *nightly(0, 7)])
def test_no_update_finds_a_row_half_computed(model, sources, prompt_of, arrivals):
    bench = recomputing(model, receiver := Endless(sources, model), 0.9)
    lost, found = set(), []
    begin, take = bench.engine.recomputation.begin, receiver.take_ready

    def begin_watched(seqs) -> None:
        lost.update(seqs)
        begin(seqs)

    def take_watched() -> Update | None:
        found.extend(seq for seq in bench.engine.roster.prefilling if seq in lost and seq.kv.length)
        return take()

    bench.engine.recomputation.begin, receiver.take_ready = begin_watched, take_watched
    for i in range(8):
        bench.submit(f"r{i}", prompt_of(40 + i, i), 40)
        tick(bench, arrivals)
    bench.run(MOST_TICKS)
    assert receiver.version > 3 and len(lost) == 8 and found == []


def test_a_prefill_that_is_in_flight_at_the_swap_is_not_the_one_that_follows(model, sources, prompt_of):
    bench = recomputing(model, mailbox := Mailbox(), 0.9)
    bench.submit("a", prompt_of(64), 10)
    tick(bench, 3)
    mailbox.ready = Update(1, sources[1], model)  # the tick below launches the last chunk
    tick(bench, 1)
    assert mailbox.ready is None and not bench.engine.roster.prefilling
    mailbox.ready = Update(2, sources[0], model)
    while not bench.engine.roster.decoding:
        tick(bench, 1)
        assert mailbox.ready is not None
    bench.run()
    assert [version for version, _ in mailbox.done] == [1, 2]


@pytest.mark.parametrize("fraction", [0.5, *nightly(0.25)])
def test_the_wait_ends_when_the_prefills_took_their_fraction_of_the_time(model, sources, prompt_of, fraction):
    """4 rows of 48 tokens, 16 a step: some 12 steps of prefill; the next update comes 12 / fraction after the last."""
    bench = recomputing(model, mailbox := Mailbox(), fraction)
    for i in range(4):
        bench.submit(f"r{i}", prompt_of(44, i), 200)
    until_all_decode(bench, 4)
    recomputation, device = bench.engine.recomputation, bench.device
    mailbox.ready = Update(1, sources[1], model)
    bench.tick_until(lambda: mailbox.done)
    began_s, spent_s, mailbox.ready = device.now_s, 0.0, Update(2, sources[0], model)
    while len(mailbox.done) < 2:
        assert (bench.engine.gate.update_waits_for == "recompute") == (mailbox.ready is not None)
        spent_s = recomputation.spent_s or spent_s
        bench.engine.tick()
    waited_s = device.now_s - began_s
    assert spent_s >= 12 and abs(waited_s - spent_s / fraction) <= 4
    bench.run()


def test_an_update_is_applied_at_once_while_no_row_runs(model, sources, prompt_of):
    bench = recomputing(model, mailbox := Mailbox(), 0.01)
    bench.submit("a", prompt_of(40), 10)
    tick(bench, 8)
    swap_under_way(bench, mailbox, Update(1, sources[1], model))
    bench.run()  # the row ends
    bench.submit("early", prompt_of(9), 5, min_version=4)
    for version in (2, 3, 4):
        mailbox.ready = Update(version, sources[version % 2], model)
        tick(bench, 1)
        assert mailbox.ready is None, "no row waits for anything that an update could take away"
        tick(bench, 1)
    bench.run()
    assert set(bench.completions["early", 0].versions) == {4}


def test_the_first_update_waits_for_nothing(model, sources, prompt_of):
    bench = recomputing(model, mailbox := Mailbox(), 0.01)
    bench.submit("a", prompt_of(40), 10)
    tick(bench, 3)
    mailbox.ready = Update(1, sources[1], model)
    tick(bench, 1)
    assert mailbox.ready is None
    bench.run()


@pytest.mark.parametrize("stop", ["pause", "hold", "falling asleep"])
def test_an_update_is_applied_at_once_while_generation_stands_still(model, sources, prompt_of, hf_models, stop):
    bench = recomputing(model, mailbox := Mailbox(), 0.01)
    gate = bench.engine.gate
    bench.submit("a", prompt_of(60), 30)
    tick(bench, 12)
    swap_under_way(bench, mailbox, Update(1, sources[1], model))
    mailbox.ready = Update(2, sources[0], model)
    tick(bench, 2)
    assert mailbox.ready is not None and gate.update_waits_for == "recompute"
    if stop == "pause":
        bench.engine.inbox.put(Pause("keep", 1))
    elif stop == "hold":  # of an update in place, which is ready as soon as the weights are written
        mailbox.ready = None
        gate.request_hold(lambda: setattr(mailbox, "ready", Update(2, sources[0], model)))
    else:
        gate.fall_asleep(1, "wait")
    tick(bench, 4)
    assert mailbox.ready is None
    bench.engine.inbox.put(Resume(2))
    gate.wake_up()
    bench.run()
    assert [version for version, _ in mailbox.done] == [1, 2]
    completion = bench.completions["a", 0]
    assert replayed(Turns(hf_models), prompt_of(60), completion) == completion.token_ids


def test_rows_that_are_cancelled_delay_no_update(model, sources, prompt_of):
    bench = recomputing(model, mailbox := Mailbox(), 0.01)
    bench.submit("a", prompt_of(60), 30)
    tick(bench, 12)
    swap_under_way(bench, mailbox, Update(1, sources[1], model))
    mailbox.ready = Update(2, sources[0], model)
    bench.engine.inbox.put(Cancel(("c", "a")))
    tick(bench, 4)
    assert mailbox.ready is None
    bench.run()


def test_rows_that_others_keep_from_coming_back_delay_no_update(model, sources, prompt_of):
    """Requests of a higher priority may keep them out for good."""
    bench = recomputing(model, mailbox := Mailbox(), 0.5, max_rows=2)
    for i in range(2):
        bench.submit(f"low{i}", prompt_of(40, i), 30)
    until_all_decode(bench, 2)
    mailbox.ready = Update(1, sources[1], model)
    for i in range(2):
        bench.submit(f"high{i}", prompt_of(40, 5 + i), 60, priority=1)
    tick(bench, 3)
    mailbox.ready = Update(2, sources[0], model)
    tick(bench, 4)
    assert mailbox.ready is None and bench.engine.roster.waiting == 2
    bench.run()
    assert {len(bench.tokens(f"low{i}")) for i in range(2)} == {30}


def test_rows_that_a_fault_ended_delay_no_update(model, sources, prompt_of):
    bench = recomputing(model, mailbox := Mailbox(), 0.01)
    bench.submit("a", prompt_of(60), 30)
    tick(bench, 12)
    swap_under_way(bench, mailbox, Update(1, sources[1], model))
    bench.engine.fail("a fault")
    rebuild_engine(bench.engine, bench.settings)
    mailbox.ready = Update(2, sources[0], model)
    tick(bench, 2)
    assert mailbox.ready is None
    bench.complete("b", prompt_of(9), 5)
    assert set(bench.completions["b", 0].versions) == {2}


def test_a_drain_ends_whatever_waits(model, sources, prompt_of):
    bench = recomputing(model, Endless(sources, model), 0.5)
    for i in range(3):
        bench.submit(f"r{i}", prompt_of(40, i), 30)
    tick(bench, 20)
    bench.engine.inbox.put(Shutdown("drain", 1))
    bench.tick_until(lambda: bench.engine.gate.stopped)
    assert {len(bench.tokens(f"r{i}")) for i in range(3)} == {30}


def test_updates_of_adapters_wait_too(model, sources, prompt_of, hf_models, folders, tmp_path_factory):
    adapters = make_adapters(hf_models[0], folders[0], tmp_path_factory)
    bench = recomputing(model, mailbox := Mailbox(), 0.5, adapter_slots=2, adapter_rank=16)
    roster = bench.engine.roster
    mailbox.ready = FeatureUpdate("a", 1, 0, PutAdapter("a", adapters[0][0], 1))
    tick(bench, 1)
    assert mailbox.ready is None
    bench.submit("plain", prompt_of(60), 100)
    bench.submit("adapted", prompt_of(60, 1), 100, adapter="a")
    until_all_decode(bench, 2)
    mailbox.ready = Update(1, sources[1], model)
    for update in (FeatureUpdate("a", 2, 0, PutAdapter("a", adapters[1][0], 2)), Update(2, sources[0], model)):
        while mailbox.ready is not None:
            tick(bench, 1)
        tick(bench, 2)
        mailbox.ready, rows = update, []
        assert any(seq.kv.length for seq in roster.prefilling), "a row is being computed again"
        while mailbox.ready is not None:
            rows = list(roster.decoding)
            tick(bench, 1)
        assert len(rows) == 2, "until both decode, the update waits"
    bench.run()
    assert [version for version, _ in mailbox.done] == [1, 1, 2, 2]


def test_kept_kv_delays_no_update(model, sources, prompt_of):
    bench = recomputing(model, receiver := Endless(sources, model), 0.01, kv_on_swap="keep")
    bench.submit("a", prompt_of(40), 30)
    bench.run(MOST_TICKS)
    assert receiver.version >= 15 and len(bench.tokens("a")) == 30


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 6))])
def test_random_updates_and_requests_have_the_tokens_of_the_kv_that_they_report(
    folders, sources, prompt_of, hf_models, seed
):
    """Groups, common prompts, few pages, priorities, cancels, pauses, and an update whenever one may be applied."""
    rng = random.Random(seed)
    model = load(folders[0])
    bench = Bench(
        model, random_delays(seed, 0.001), receiver := Endless(sources, model), kv_on_swap="recompute",
        recompute_fraction=rng.choice((0.2, 0.5, 0.9)), kv_pages=rng.choice((60, 256)),
        prefill_chunk_tokens=rng.choice((8, 64)), host_kv_gib=rng.choice((0, 0.001)),
        prefix_cache=rng.random() < 0.7, pipeline_depth=rng.choice((1, 2)),
    )  # fmt: skip
    receiver.bench = bench
    prompts = {f"r{i}": prompt_of(rng.choice((5, 16, 30)), rng.randint(0, 3)) for i in range(10)}
    cancelled = set()
    for name, prompt in prompts.items():
        bench.submit(name, prompt, rng.randint(1, 40), n=rng.choice((1, 1, 3)), priority=rng.randint(0, 1))
        tick(bench, rng.choice((0, 3, 20)))
        if rng.random() < 0.2:
            cancelled.add(name)
            bench.engine.inbox.put(Cancel(("c", name)))
        if rng.random() < 0.2:
            bench.engine.inbox.put(Pause("keep", 1))
            tick(bench, rng.choice((1, 5)))
            bench.engine.inbox.put(Resume(2))
    bench.run()
    for (name, _), completion in bench.completions.items():
        assert completion.finish.reason == "length" or name in cancelled
        assert replayed(Turns(hf_models), prompts[name], completion) == completion.token_ids
    assert not any(seq.state is SequenceState.PREFILL for seq in bench.engine.roster.unfinished())
