"""KV of an idle session leaves a GPU and returns beside running steps: the same tokens, and no step that waits."""

import statistics

import pytest
import torch

from rollout.engine.device.streams import Device, make_device
from tests.support.engine.conversation import Conversation
from tests.support.engine.cuda_harness import no_waiting
from tests.support.engine.harness import Bench, load
from tests.support.engine.offloading import copies_pay, host_tier

pytestmark = pytest.mark.gpu


def tiered(folder, device: Device, **fields) -> Bench:
    model = load(folder, str(device.torch_device))
    return Bench(model, device, kv_pages=200, host_kv_gib=0.02, **fields)


def crowd_out(bench: Bench, prompt_of) -> None:
    """First some prompts, so that the pool gets short, then more at once: the session gives way, and then its pages."""
    for i, count in enumerate((3, 3, 6, 6, 6)):
        names = [f"crowd {i} {j}" for j in range(count)]
        for j, name in enumerate(names):
            bench.submit(name, prompt_of(110, 500 + 10 * i + j), 8)
        while not all(name in bench.done for name in names):
            bench.engine.tick()
    assert bench.engine.roster.allocator.sessions.counts.evicted == 1


@pytest.mark.parametrize(("depth", "captured"), [(1, False), (2, True)])
def test_a_sessions_kv_leaves_and_returns_beside_running_steps(folders, prompt_of, greedy, depth, captured):
    bench = tiered(
        folders[0], make_device("cuda"), pipeline_depth=depth, cuda_graph_rows=256 * captured, host_kv_piece_mib=0.2
    )
    check_return(bench, prompt_of, greedy)


def check_return(bench: Bench, prompt_of, greedy) -> None:
    talk, tier = Conversation(bench, "talk", prompt_of), host_tier(bench).known
    copies_pay(bench)
    talk.say(150)
    bench.submit("runs", prompt_of(9, 3), 200)
    bench.tick_until(lambda: bench.engine.roster.decoding)
    crowd_out(bench, prompt_of)
    before, first = tier.host.counts.fetched, bench.engine.meter.steps
    talk.submit(7)
    bench.tick_while(lambda: talk.turn not in bench.done)
    steps = bench.engine.meter.steps - first
    assert tier.host.counts.fetched - before >= 30, "its pages came back"
    assert talk.reused >= 152 and bench.done[talk.turn].cached_tokens >= 152
    said = list(talk.said)
    assert talk.ended() == greedy(said, 9)
    moves = host_tier(bench).recent
    longest_s = max(move.end_s - move.start_s for move in moves)
    timings = [step for step in bench.engine.meter.recent_steps(steps) if step.kind == "decode"]
    fetched = [move for move in moves if move.direction == "in"]
    beside = [s for s in timings if any(m.start_s < s.end_s and s.start_s < m.end_s for m in fetched)]
    alone = statistics.median(s.end_s - s.start_s for s in timings)
    delays = sorted(s.end_s - s.start_s - alone for s in beside)
    assert not delays or delays[len(delays) // 2] <= longest_s + 1e-3, "steps waited for more than a piece"
    bench.run()
    assert bench.tokens("runs") == greedy(prompt_of(9, 3), 200)
    bench.close()


def test_moving_known_pages_takes_no_memory_and_synchronises_nothing(folders, prompt_of):
    bench = tiered(folders[0], make_device("cuda"), host_kv_piece_mib=0.2)
    # A model of this size computes pages quicker than it fetches them.
    copies_pay(bench)
    prompts = [prompt_of(120, i) for i in range(12)]
    for turn in range(2):  # kernels are loaded at their first use
        for i, prompt in enumerate(prompts):
            bench.complete(f"r{turn} {i}", prompt, 1)
    fetched = host_tier(bench).known.host.counts.fetched
    assert fetched > 0
    for i, prompt in enumerate(prompts[:4]):
        bench.submit(f"again {i}", prompt, 1)
    held = torch.cuda.memory_reserved()  # the prompts' last tokens are computed, in memory of torch's own pool
    with no_waiting():
        bench.ticks(60)
    bench.run()
    assert torch.cuda.memory_reserved() == held
    assert host_tier(bench).known.host.counts.fetched > fetched
