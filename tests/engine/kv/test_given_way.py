"""Room that is made in vain: what was found for a sequence may have given way meanwhile."""

import torch

from tests.support.engine.conversation import Conversation
from tests.support.engine.harness import Bench, load
from tests.support.engine.harness import prompt_of as any_prompt
from tests.support.engine.offloading import PAGE, copies_pay, offloading
from tests.support.engine.streams import InlineDevice
from tests.support.models.hybrids import make_hybrid


def grow_until(bench: Bench, available: int) -> None:
    """Tick until a row has left no more pages than these."""
    bench.tick_while(lambda: bench.engine.roster.allocator.pool.available > available)


def test_a_place_for_a_fetch_without_room_takes_no_snapshot_that_was_found(tmp_path):
    torch.set_num_threads(1)
    make_hybrid("Qwen3_5", tmp_path, 0)
    model = load(tmp_path)

    def prompt_of(length: int, salt: int) -> list[int]:
        return [token % 83 for token in any_prompt(length, salt)]

    host_gib = 200 * model.spec.state_bytes(torch.float32) / 2**30
    fields = {"kv_pages": 84, "host_kv_gib": host_gib, "page_size": PAGE, "max_rows": 4, "state_snapshots": 2}
    bench = Bench(model, InlineDevice(), **fields)
    copies_pay(bench)
    talk = prompt_of(50, 1)
    longer = talk + prompt_of(150, 2)
    for name, prompt in (("short", talk), ("long", longer)):
        bench.complete(name, prompt, 1)
    for i in range(8):
        bench.complete(f"filler{i}", prompt_of(100, 500 + i), 2)
    bench.submit("row", prompt_of(9, 77), 290)
    grow_until(bench, 30)
    bench.submit("again", talk, 1)
    bench.tick_while(lambda: "again" not in bench.done)
    bench.complete("turn", longer + [1, 2, 3], 2)
    alone = Bench(model)
    alone.complete("turn", longer + [1, 2, 3], 2)
    assert bench.tokens("turn") == alone.tokens("turn")
    alone.close(), bench.close()


def test_a_session_that_gives_way_for_a_fetch_without_room_is_not_used(model, prompt_of, greedy):
    bench = offloading(model, 400, kv_pages=81)
    copies_pay(bench)
    known, begin = prompt_of(100, 1), prompt_of(80, 2)
    bench.complete("known", known, 1)
    for i in range(12):
        bench.complete(f"filler{i}", prompt_of(60, 5000 + i), 1)
    own, other = Conversation(bench, "own", prompt_of), Conversation(bench, "other", prompt_of)
    own.submit(0, 1, prompt=known[:41])
    bench.run()
    other.submit(0, 1, prompt=begin)
    bench.run()
    bench.submit("row", begin + prompt_of(3, 3), 200)
    grow_until(bench, 12)
    own.submit(0, 2, prompt=known)
    bench.run()
    assert bench.tokens(own.turn) == greedy(known, 2)


def test_pages_without_a_key_are_not_used_once_their_session_gave_way(model, prompt_of, greedy):
    bench = Bench(model, kv_pages=81)
    own, twin, other = (Conversation(bench, name, prompt_of) for name in ("own", "twin", "other"))
    for talk in (twin, own):  # the pages of the second completion have the keys of the first one's
        talk.submit(0, 40, prompt=prompt_of(10, 1))
        bench.run()
    other.submit(0, 1, prompt=prompt_of(80, 2))
    bench.run()
    bench.submit("row", prompt_of(80, 2) + prompt_of(3, 3), 200)
    grow_until(bench, 10)
    own.ended()
    own.submit(60, 2)
    bench.run()
    assert bench.tokens(own.turn) == greedy(own.said, 2)


def test_a_fetch_without_its_half_full_page_begins_with_no_page_that_gave_way(model, greedy):
    """The session that the pages before the fetch are of gives way to the fetch with that page."""
    bench = offloading(model, 400, kv_pages=81)
    copies_pay(bench)
    first = any_prompt(10, 1)
    said = first + greedy(first, 40)
    long = said + any_prompt(31, 9)
    after = long + greedy(long, 2)[:1] + [7]
    bench.complete("long", long, 2)
    for i in range(12):
        bench.complete(f"filler{i}", any_prompt(60, 5000 + i), 1)
    bench.complete("twin", first, 40)
    own, other = (Conversation(bench, name, any_prompt) for name in ("own", "other"))
    own.submit(0, 40, prompt=first)
    bench.run()
    other.submit(0, 1, prompt=any_prompt(80, 2))
    bench.run()
    bench.submit("row", any_prompt(80, 2) + any_prompt(3, 3), 200)
    grow_until(bench, 5)
    own.ended()
    own.submit(0, 2, prompt=after)
    bench.run()
    assert bench.tokens(own.turn) == greedy(after, 2)
