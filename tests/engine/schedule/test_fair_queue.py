"""The order of the queue: priorities, then clients by tokens, then arrival. What a long queue costs other clients."""

import random
from collections import Counter
from itertools import count

import numpy as np
import pytest

from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request
from rollout.engine.messages.to_engine import Cancel, Pause
from rollout.engine.schedule.fair_queue import WaitingQueue
from rollout.engine.sequence.sequence import PLAIN_WEIGHTS, Group, Sequence, Variant
from tests.support.engine.harness import Bench
from tests.support.kernels.grids import nightly

PROMPT = Prompt.of_tokens(np.arange(2, dtype=np.int32))


class Rows:
    """A queue, and the sequences that have taken a row from it."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.tokens: Counter[str] = Counter()  # taken, by client
        self._arrivals = count(1)

    def sequence(self, client: str, tokens: int = 10, priority: int = 0, variant: Variant = PLAIN_WEIGHTS) -> Sequence:
        """A sequence that takes this number of tokens when it runs."""
        request = Request((client, "r"), PROMPT, tokens - len(PROMPT), priority=priority)
        return Sequence(Group(request, 0.0, client, variant=variant), 0, next(self._arrivals))

    def push(self, client: str, number: int = 1, **fields) -> list[Sequence]:
        sequences = [self.sequence(client, **fields) for _ in range(number)]
        for seq in sequences:
            self.queue.push(seq)
        return sequences

    def first(self, passed: object = ()) -> Sequence | None:
        """The first of the queue; the variants `passed` are not ready."""
        return next((seq for seq in self.queue.heads() if seq.group.variant not in passed), None)

    def start(self) -> Sequence:
        """The first of the queue gets a row."""
        seq = self.first()
        self.queue.take(seq)
        if not seq.begun:
            seq.queued.computed = len(PROMPT)
            self.tokens[seq.group.client] += len(PROMPT) + seq.max_tokens
        return seq

    def end(self, seq: Sequence) -> None:
        seq.tokens.extend([0] * seq.max_tokens)
        seq.finalized = True
        self.queue.ended(seq)

    def run(self) -> str:
        """The first of the queue gets a row and ends; its client."""
        seq = self.start()
        self.end(seq)
        return seq.group.client


# --- the queue -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(6), *nightly(*range(6, 20))])
def test_one_client_is_served_by_priority_and_arrival_whatever_its_sequences_cost(seed):
    rng, rows = random.Random(seed), Rows()
    waiting: list[Sequence] = []
    for _ in range(300):
        action = rng.random()
        if action < 0.5 or not waiting:
            variant = rng.choice([PLAIN_WEIGHTS, Variant(1)])
            waiting += rows.push("a", tokens=rng.randrange(3, 90), priority=rng.randrange(3), variant=variant)
        elif action < 0.6:
            ended = waiting.pop(rng.randrange(len(waiting)))
            rows.end(ended)
        else:
            expected = min(waiting, key=lambda seq: seq.order)
            assert rows.first() is expected
            if rng.random() < 0.2:
                rows.queue.push(expected, rows.queue.withdraw(expected))
                continue
            rows.start()
            waiting.remove(expected)
            if rng.random() < 0.3:  # preempted
                rows.queue.push(expected)
                waiting.append(expected)
            else:
                rows.end(expected)
    for seq in waiting:
        rows.end(seq)
    assert rows.first() is None and rows.queue.clients == 0


def test_clients_with_equal_sequences_take_one_after_the_other():
    rows = Rows()
    rows.push("a", 100)
    assert [rows.run() for _ in range(20)] == ["a"] * 20
    rows.push("b", 100)
    rows.push("c", 3)
    order = [rows.run() for _ in range(30)]
    assert order[:9].count("c") == 3 and abs(order.count("a") - order.count("b")) <= 2


def test_clients_get_equal_tokens_not_equal_sequences():
    rows = Rows()
    rows.push("short", 2000, tokens=10)
    rows.push("long", 200, tokens=100)
    for _ in range(1000):
        rows.run()
    assert abs(rows.tokens["short"] - rows.tokens["long"]) < 10 * 100


def test_a_client_that_was_away_gets_no_credit_for_it():
    rows = Rows()
    rows.push("b", 10)
    rows.push("a", 400)
    for _ in range(220):
        rows.run()  # for most of this time b has nothing to wait for
    rows.push("b", 100)
    order = [rows.run() for _ in range(40)]
    assert order.index("b") <= 1 and abs(order.count("a") - order.count("b")) <= 2


def test_one_request_of_a_client_that_sends_one_at_a_time_waits_for_one_or_two_others():
    rows = Rows()
    rows.push("a", 400)
    for _ in range(50):
        rows.run()
    for _ in range(30):
        rows.push("b")
        assert "b" in [rows.run() for _ in range(3)]


def test_priority_comes_before_fairness():
    rows = Rows()
    rows.push("a", 50)
    rows.push("b", 5, priority=-1)
    rows.push("a", 50, priority=1)
    rows.push("b", 5, priority=1)
    priorities = []
    while rows.queue.clients:
        seq = rows.start()
        priorities.append(seq.priority)
        rows.end(seq)
    assert priorities == sorted(priorities, reverse=True)


def test_waiting_behind_a_higher_priority_gives_no_credit():
    rows = Rows()
    rows.push("a", 100)
    rows.push("c", 200, priority=1)
    while rows.run() == "c":
        pass
    rows.push("b", 100)
    order = [rows.run() for _ in range(20)]
    assert abs(order.count("a") - order.count("b")) <= 2


def test_a_preempted_sequence_is_first_and_paid_for():
    rows = Rows()
    rows.push("a", 100)
    preempted = rows.start()
    rows.push("b", 100)
    for _ in range(10):
        rows.run()
    rows.queue.push(preempted)
    assert rows.start() is preempted
    order = [rows.run() for _ in range(10)]
    assert abs(order.count("a") - order.count("b")) <= 1


def test_a_sequence_that_joined_another_prefill_keeps_its_place():
    rows = Rows()
    (joined,) = rows.push("a")
    rows.push("b", 50)
    assert rows.first() is joined
    time = rows.queue.withdraw(joined)
    for _ in range(10):
        assert rows.run() == "b"
    rows.queue.push(joined, time)
    assert rows.start() is joined


def test_a_variant_that_is_not_ready_delays_only_its_own_sequences():
    rows, far, near = Rows(), Variant(1), Variant(2)
    rows.push("a", variant=far)
    (second,) = rows.push("b", variant=near)
    (plain,) = rows.push("b")
    rows.push("b", variant=far)
    for expected in (second, plain):
        assert rows.first((far,)) is expected
        rows.queue.take(expected)
    assert rows.first((far,)) is None
    assert [rows.start().group.client for _ in range(2)] == ["a", "b"]


def test_heads_are_the_first_of_each_variant_by_arrival_whatever_passes():
    rng, rows = random.Random(1), Rows()
    variants = [PLAIN_WEIGHTS, *(Variant(edition) for edition in range(1, 7))]
    waiting = [rows.push("a", variant=rng.choice(variants), tokens=rng.randrange(3, 40))[0] for _ in range(200)]
    while waiting:
        firsts = [next((seq for seq in waiting if seq.group.variant is variant), None) for variant in variants]
        heads = rows.queue.heads()
        assert heads == sorted(filter(None, firsts), key=lambda seq: seq.order)
        taken = rng.choice(heads)
        rows.queue.take(taken)
        waiting.remove(taken)
        rows.end(taken)
    assert not rows.queue.heads() and rows.queue.clients == 0


def test_clients_that_pass_get_equal_tokens_and_the_one_that_waits_is_first_again():
    rows, far, near = Rows(), Variant(1), Variant(2)
    (waits,) = rows.push("c", variant=far)
    rows.push("a", 400, variant=near, tokens=10)
    rows.push("b", 40, variant=near, tokens=100)
    for _ in range(200):
        seq = rows.first((far,))
        rows.queue.take(seq)
        seq.queued.computed = len(PROMPT)
        rows.tokens[seq.group.client] += len(PROMPT) + seq.max_tokens
        rows.end(seq)
    assert abs(rows.tokens["a"] - rows.tokens["b"]) < 10 * 100
    assert rows.first() is waits


def test_new_clients_without_end_do_not_starve_another():
    rows = Rows()
    rows.push("a", 100, tokens=50)
    names, served = count(), Counter()
    for _ in range(4):
        rows.push(str(next(names)), tokens=20)
    for _ in range(600):
        served[client := rows.run()] += 1
        if client != "a":
            rows.push(str(next(names)), tokens=20)
    assert 40 < served["a"] < 70, "a fifth of the tokens: 54 of its sequences"


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 8))])
def test_no_client_that_waits_leads_another_by_more_than_some_sequences(seed):
    """Clients come and go, rows end in any order; each client has its own range of costs, unknown to the queue."""
    rng, rows = random.Random(seed), Rows()
    clients = [f"c{i}" for i in range(rng.randrange(2, 6))]
    largest = {client: rng.choice([10, 50, 400]) for client in clients}
    most_rows = rng.choice([1, 4, 16])
    running: list[Sequence] = []
    waiting: Counter[str] = Counter()
    since: dict[str, Counter[str]] = {}  # tokens of all clients when this one began to wait
    bound = (8 + most_rows) * max(largest.values())
    started = 0
    while started < 4000:
        client = rng.choice(clients)
        if rng.random() < 0.4 and waiting[client] < 400:
            for _ in range(rng.choice([1, 1, 100])):
                rows.push(client, tokens=rng.randrange(3, largest[client]))
                waiting[client] += 1
            since.setdefault(client, rows.tokens.copy())
        while len(running) < most_rows and rows.queue.clients:
            seq = rows.start()
            started += 1
            running.append(seq)
            waiting[seq.group.client] -= 1
            if not waiting[seq.group.client]:
                del since[seq.group.client]
        if running:
            rows.end(running.pop(rng.randrange(len(running))))
        for one in since:
            for other in since:
                both = max(since[one], since[other], key=Counter.total)
                lead = rows.tokens[one] - both[one] - (rows.tokens[other] - both[other])
                assert lead <= bound
    assert rows.tokens.total() > 10 * bound


def test_clients_that_are_gone_are_forgotten():
    rows = Rows()
    rows.push("stays")
    for i in range(1000):
        (seq,) = rows.push(f"c{i}")
        rows.end(seq)
        assert rows.queue.clients == 1
    rows.run()
    assert rows.queue.clients == 0


# --- the engine ------------------------------------------------------------------------------------------------------

LENGTH = 12  # tokens of a completion


def steps_until_done(bench: Bench, name: str) -> int:
    before = bench.engine.meter.steps
    bench.tick_while(lambda: name not in bench.done)
    return bench.engine.meter.steps - before


def crowd(model, prompt_of, client: str) -> tuple[Bench, int]:
    """Client a queues 240 completions, then `client` sends b; the steps in which b is done."""
    bench = Bench(model)
    rng = random.Random(0)
    for i in range(240):
        bench.submit(f"a{i}", prompt_of(5, i), rng.randrange(LENGTH // 2, 3 * LENGTH // 2), client="a")
    bench.ticks(100)
    bench.submit("b", prompt_of(9, 999), LENGTH, client=client)
    return bench, steps_until_done(bench, "b")


@pytest.mark.nightly
def test_one_request_does_not_wait_for_240_completions_of_another_client(model, prompt_of):
    alone = Bench(model)
    alone.submit("b", prompt_of(9, 999), LENGTH, client="b")
    alone_steps = steps_until_done(alone, "b")

    fair, fair_steps = crowd(model, prompt_of, client="b")
    assert fair_steps <= 2 * alone_steps
    fair.finish()

    by_arrival, arrival_steps = crowd(model, prompt_of, client="a")
    assert len(by_arrival.done) > 230 and arrival_steps > 10 * alone_steps
    by_arrival.finish()
    assert fair.tokens("b") == by_arrival.tokens("b") == alone.tokens("b")
    assert all(fair.tokens(f"a{i}") == by_arrival.tokens(f"a{i}") for i in range(240))


def test_one_group_of_240_is_not_ahead_of_another_client(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), LENGTH, client="a", n=240)
    bench.ticks(10)
    bench.submit("b", prompt_of(9, 1), LENGTH, client="b", n=8)
    assert steps_until_done(bench, "b") < 6 * LENGTH  # 8 rows: alternately with a's
    bench.run()


def test_two_clients_get_equal_tokens_while_both_wait(model, prompt_of):
    """One wants long completions, the other short ones: the same number of tokens each, prompts included."""
    bench = Bench(model, max_rows=4)
    for i in range(40):
        bench.submit(f"long{i}", prompt_of(3, i), 60, client="long")
    for i in range(200):
        bench.submit(f"short{i}", prompt_of(3, i), 6, client="short")

    def tokens_at(step: int) -> dict[str, int]:
        bench.tick_while(lambda: bench.engine.meter.steps < step)
        ended = {"long": 3 + 60, "short": 3 + 6}
        return {client: sum(name.startswith(client) for name in bench.done) * ended[client] for client in ended}

    before, after = tokens_at(100), tokens_at(600)  # the first have ended before: the queue knows their lengths
    assert bench.status().queue_clients == 2
    short, long = (after[client] - before[client] for client in ("short", "long"))
    assert 0.75 < short / long < 1.33, (short, long)
    bench.engine.inbox.put(Pause("abort", 0))
    bench.run()


def test_a_client_does_not_lose_its_row_to_the_many_rows_of_another(model, prompt_of):
    """Pages run short again and again; the youngest request of all belongs to b."""
    bench = Bench(model, kv_pages=60, max_rows=8)
    for i in range(60):
        bench.submit(f"a{i}", prompt_of(8, i), 60, client="a")
    bench.ticks(20)
    bench.complete("b", prompt_of(8, 99), 60, client="b")
    assert sum(bench.done[f"a{i}"].preemptions for i in range(60)) > 10
    assert bench.done["b"].preemptions <= 1


def test_requests_with_one_prompt_that_join_its_prefill_leave_others_their_place(model, prompt_of):
    bench = Bench(model, max_rows=2, prefill_chunk_tokens=8)
    for i in range(40):
        bench.submit(f"a{i}", prompt_of(61), 20, client="a")
    bench.engine.tick()
    bench.submit("b", prompt_of(61), 20, client="b")
    bench.ticks(2)
    bench.submit("c", prompt_of(30, 1), 20, client="c")
    bench.tick_while(lambda: not {"b", "c"} <= bench.done.keys())
    assert len(bench.done) < 12
    bench.run()


def test_clients_whose_requests_were_cancelled_are_forgotten(model, prompt_of):
    bench = Bench(model, max_rows=1)
    bench.submit("runs", prompt_of(9), 400)
    bench.submit("waits", prompt_of(9), 4)
    for i in range(200):
        bench.submit(f"r{i}", prompt_of(9), 3, client=f"c{i}")
        bench.engine.inbox.put(Cancel((f"c{i}", f"r{i}")))
        bench.engine.tick()
    assert bench.status().queue_clients == 1
    bench.run()


def test_a_preempted_sequence_whose_variant_is_not_ready_does_not_speed_up_its_client():
    rows = Rows()
    variant = Variant(1)
    (preempted,) = rows.push("a", variant=variant)
    rows.queue.take(preempted)
    preempted.queued.computed = 2
    rows.push("b", 100)
    rows.push("a", 100)
    rows.queue.push(preempted)
    order = []
    for _ in range(40):
        seq = rows.first((variant,))
        rows.queue.take(seq)
        seq.queued.computed = 2
        rows.end(seq)
        order.append(seq.group.client)
    assert abs(order.count("a") - order.count("b")) <= 4
