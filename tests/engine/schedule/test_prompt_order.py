"""The order in which the prompts of rows are computed: clients take turns, and no row waits for ever."""

from itertools import count

import numpy as np
import pytest

from rollout.engine.messages.prompts import Prompt
from rollout.engine.messages.requests import Request
from rollout.engine.schedule.fair_queue import PromptOrder
from rollout.engine.sequence.sequence import Group, Sequence
from tests.support.engine.harness import Bench, load
from tests.support.engine.updates import Mailbox, Update

CHUNK = 64  # tokens of a step, as `Bench` sets it


@pytest.fixture
def sources(folders):
    return [load(folder) for folder in folders]


class Rows:
    """Rows with prompts, and their order."""

    def __init__(self) -> None:
        self.prefilling: list[Sequence] = []
        self.order = PromptOrder(self.prefilling)
        self._arrivals = count(1)

    def sequence(self, client: str, begun: bool = False) -> Sequence:
        prompt = Prompt.of_tokens(np.arange(2, dtype=np.int32))
        seq = Sequence(Group(Request((client, "r"), prompt, 4), 0.0, client), 0, next(self._arrivals))
        seq.queued.computed = int(begun)
        return seq

    def admit(self, client: str, *lengths: int, begun: bool = False) -> list[Sequence]:
        found = [self.sequence(client, begun) for _ in lengths]
        for seq, tokens in zip(found, lengths, strict=True):
            self.order.admit(seq, tokens)
        return found

    def begin(self, seq: Sequence) -> None:
        self.order.begin(seq)
        seq.row_ready = True

    def compute(self) -> Sequence:
        """The first prompt is computed whole."""
        seq = self.prefilling[0]
        self.begin(seq)
        return self.prefilling.pop(0)


def test_clients_take_turns_by_tokens():
    rows = Rows()
    a, b = rows.admit("a", 10, 10, 10), rows.admit("b", 25, 5)
    assert rows.prefilling == [a[0], a[1], b[0], a[2], b[1]]  # at 10, 20, 25, 30 and 30
    for _ in range(3):
        rows.compute()
    late = rows.admit("late", 4)  # at 29: it has no credit for the time before
    assert rows.prefilling == [*late, a[2], b[1]]


def test_one_client_keeps_the_order_of_admission():
    rows = Rows()
    a = rows.admit("a", 50, 3, 200)
    again = rows.admit("a", 70, begun=True)
    assert rows.prefilling == [*a, *again]


def test_a_prompt_that_has_begun_goes_on():
    rows = Rows()
    (long,) = rows.admit("a", 1000)
    rows.begin(long)
    (short,) = rows.admit("b", 1)
    assert rows.prefilling == [long, short]


def test_what_is_computed_again_costs_its_client_nothing():
    rows = Rows()
    others = rows.admit("b", 30)
    (again,) = rows.admit("a", 500, begun=True)
    (own,) = rows.admit("a", 20)
    assert rows.prefilling == [again, own, *others]


def test_a_row_whose_prompt_another_client_waits_for_is_due_earlier_at_its_cost():
    rows = Rows()
    a = rows.admit("a", 60, 60, 60)
    rows.order.hasten(a[2], rows.sequence("b"), 40)
    assert rows.prefilling == [a[2], a[0], a[1]]
    (own,) = rows.admit("b", 30)
    assert rows.prefilling == [a[2], a[0], own, a[1]]  # at 40, 60, 70 and 120
    rows.order.hasten(a[1], rows.sequence("b"), 100)
    assert rows.prefilling == [a[2], a[0], own, a[1]], "b would be due later"


def test_one_that_waits_to_be_computed_again_hastens_a_row_at_no_cost():
    rows = Rows()
    a = rows.admit("a", 60, 60)
    rows.order.hasten(a[1], rows.sequence("b", begun=True), 500)
    (own,) = rows.admit("b", 10)
    assert rows.prefilling == [a[1], own, a[0]]


def test_clients_that_are_gone_are_forgotten():
    rows = Rows()
    for i in range(1000):
        rows.admit(f"c{i}", 10)
        rows.compute()
    assert len(rows.order.last_due) < 3


# --- the engine ------------------------------------------------------------------------------------------------------


def steps_until(bench: Bench, done, most: int = 1000, before_each=lambda: None) -> int:
    start = bench.engine.meter.steps
    while not done():
        before_each()
        bench.engine.tick()
        assert bench.engine.meter.steps - start < most
    return bench.engine.meter.steps - start


@pytest.mark.parametrize("joins", ["nothing", "a prompt", "a first page"])
def test_a_prompt_does_not_wait_for_40_of_another_client(model, prompt_of, joins):
    """There are rows for all; a step takes one prompt of this length."""
    last = prompt_of(60, 39)
    prompt = {"nothing": prompt_of(60, 99), "a prompt": last, "a first page": [*last[:4], *prompt_of(56, 99)]}[joins]

    def steps(fair: bool) -> int:
        bench = Bench(model, max_rows=64, kv_pages=2000)
        for i in range(40):
            bench.submit(f"a{i}", prompt_of(60, i), 4, client="a")
        bench.ticks(10)
        bench.submit("b", prompt, 4, client="b" if fair else "a")
        count = steps_until(bench, lambda: "b" in bench.done)
        bench.run()
        bench.engine.check_integrity()
        bench.close()
        return count

    assert steps(fair=True) <= 24 and steps(fair=False) > 60


class Crowd:
    """There are always prompts of others: each of a client of its own, or all of one."""

    def __init__(self, bench: Bench, prompt_of, tokens: int, own_clients: bool, priority: int = 0) -> None:
        self._bench, self._prompt_of, self._tokens = bench, prompt_of, tokens
        self._own_clients, self._priority, self._sent = own_clients, priority, 0

    def feed(self) -> None:
        while self._sent - sum(name.startswith("n") for name in self._bench.done) < 8:
            self._sent += 1
            client = f"c{self._sent}" if self._own_clients else "c"
            prompt = self._prompt_of(self._tokens, 1000 + self._sent)
            self._bench.submit(f"n{self._sent}", prompt, 1, client=client, priority=self._priority)


@pytest.mark.parametrize("own_clients", [True, False])
@pytest.mark.parametrize("tokens", [16, 64, 128])
def test_a_long_prompt_is_computed_whatever_others_send(model, prompt_of, tokens, own_clients):
    bench = Bench(model, max_rows=32, kv_pages=2000)
    crowd = Crowd(bench, prompt_of, tokens, own_clients)
    crowd.feed()
    bench.ticks(6)
    bench.submit("a", prompt_of(300, 1), 4, client="a")
    # Nine clients share the steps: 9 * 300 tokens of 64 a step, and as many steps that decode.
    assert steps_until(bench, lambda: "a" in bench.done, before_each=crowd.feed) < 2 * 9 * 300 / CHUNK + 40
    bench.run()
    bench.engine.check_integrity()


@pytest.mark.parametrize(("priority", "own_clients"), [(1, False), (0, True)])
def test_what_an_update_dropped_is_computed_again_whatever_others_send(
    model, sources, prompt_of, priority, own_clients
):
    """The next update waits for it."""
    mailbox = Mailbox()
    recompute = {"kv_on_swap": "recompute", "recompute_fraction": 0.5}
    bench = Bench(model, None, mailbox, max_rows=32, kv_pages=2000, **recompute)
    bench.submit("a", prompt_of(300, 1), 180, client="a")
    bench.tick_until(lambda: bench.engine.roster.decoding)
    crowd = Crowd(bench, prompt_of, CHUNK, own_clients, priority)
    crowd.feed()
    for version in (1, 2):
        mailbox.ready = Update(version, sources[version % 2], model)
        assert steps_until(bench, lambda: mailbox.ready is None, before_each=crowd.feed) < 100
    assert "a" not in bench.done
    bench.run()
    bench.engine.check_integrity()
