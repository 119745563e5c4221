"""Clients, publishers and workers in a process that did not make them: forked, copied, pickled.

A fork runs in a process of its own, because the tests' process has threads; a call that hangs ends with its time limit.
"""

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bridge.client_script import only_generate
from tests.support.bridge.fake_worker import FAKE_WORKER
from tests.support.bridge.harness import Worker
from tests.support.bridge.scripted_worker import ScriptedWorker, counting
from tests.support.patience import PATIENCE_S
from trainer_bridge import AsyncRolloutClient, RolloutClient, WeightPublisher, start_worker
from trainer_bridge.integrations.background import BackgroundClient

#: The test's part defines `entries`, which are called in a forked process, and `owner`, which is called here after it.
SCRIPT = """
import asyncio, gc, json, os, sys
from trainer_bridge import AsyncRolloutClient, RolloutClient, start_worker
from trainer_bridge.integrations.background import BackgroundClient
endpoint, folder = sys.argv[1:]
kept, end = [], sys.exit

def outcome(entry):
    try:
        return repr(entry())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

SETUP

sys.stdout.flush()
child = os.fork()
if child == 0:
    told = {name: outcome(entry) for name, entry in entries.items()}
    print(json.dumps([os.getppid(), os.getpid(), told]), flush=True)
    entries.clear()
    kept.clear()
    gc.collect()
    end(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(json.dumps(owner()), flush=True)
"""

CLIENTS = """
client, named = RolloutClient(endpoint), RolloutClient(endpoint, client="trainer")
resuming = RolloutClient(endpoint, resume=True, journal=folder + "/journal")
background = BackgroundClient(endpoint)
stream, session = client.generate([1], stream="tokens"), client.session("talk")
resumed = resuming.generate([1], request_id="a", stream="tokens")
future, outcomes = background.generate([1]), client.generate_as_completed([[1], [1]])
kept += [client, named, resuming, background, stream, session, resumed, future, outcomes]
entries = {
    "generate": lambda: client.generate([2]),
    "generate with resume": lambda: resuming.generate([2], request_id="b"),
    "generate_many": lambda: client.generate_many([[2]]),
    "generate_as_completed": lambda: next(client.generate_as_completed([[2]])),
    "outcomes": lambda: next(outcomes),
    "attach": lambda: named.attach("x"),
    "status": lambda: client.status(),
    "ping": lambda: client.ping(),
    "pause": lambda: client.pause(),
    "cancel": lambda: client.cancel("x"),
    "prefetch": lambda: client.prefetch(session="talk"),
    "report": lambda: client.report("x", []),
    "ack": lambda: client.ack(["x"]),
    "end_session": lambda: client.end_session("talk"),
    "add": lambda: client.add("tcp://127.0.0.1:9"),
    "remove": lambda: client.remove(endpoint),
    "journaled": lambda: resuming.journaled(),
    "enter": lambda: client.__enter__(),
    "close": lambda: client.close(),
    "close with resume": lambda: resuming.close(),
    "stream": lambda: next(stream),
    "stream.wait": lambda: stream.wait(),
    "stream.cancel": lambda: stream.cancel(),
    "stream.close": lambda: stream.close(),
    "resumed": lambda: next(resumed),
    "session.generate": lambda: session.generate([2]),
    "session.end": lambda: session.end(),
    "session.enter": lambda: session.__enter__(),
    "background.generate": lambda: background.generate([2]),
    "background.generate_many": lambda: background.generate_many([[2]]),
    "background.add": lambda: background.add("tcp://127.0.0.1:9"),
    "background.close": lambda: background.close(),
    "future": lambda: future.result(),
    "future.cancel": lambda: future.cancel(),
    "future.done": lambda: future.done(),
}
def owner():
    told = [each.generate([2]).completions[0].token_ids.tolist() for each in (client, named)]
    told.append(background.generate([2]).result().completions[0].token_ids.tolist())
    assert resuming.journaled() == {"a": False}, "the fork wrote to the journal"
    stream.close()
    for each in (client, named, resuming, background):
        each.close()
    return told
"""

ASYNCIO = """
end = os._exit  # a loop that Python collects closes, and so leaves the epoll that parent and child share
async def made():
    client = AsyncRolloutClient(endpoint)
    return client, await client.generate([1], stream="tokens"), client.session("talk")

loop = asyncio.new_event_loop()
client, stream, session = loop.run_until_complete(made())
unawaited = client.generate([2])
kept += [client, stream, session, unawaited]
run = lambda step: lambda: asyncio.run(step())
async def ask(method, *given): return await getattr(client, method)(*given)
async def await_it(): return await unawaited
async def enter(): return await client.__aenter__()
async def read(): return await anext(stream)
async def settle(): return [each async for each in client.generate_as_completed([[2]])]
entries = {
    "generate": run(lambda: ask("generate", [2])),
    "generate_many": run(lambda: ask("generate_many", [[2]])),
    "generate_as_completed": run(settle),
    "status": run(lambda: ask("status")),
    "cancel": run(lambda: ask("cancel", "x")),
    "close": run(lambda: ask("close")),
    "enter": run(enter),
    "unawaited": run(await_it),
    "stream": run(read),
    "stream.wait": run(lambda: stream.wait()),
    "stream.close": lambda: stream.close(),
    "session.generate": run(lambda: session.generate([2])),
    "session.end": lambda: session.end(),
    "end_session": lambda: client.end_session("talk"),
    "add": lambda: client.add("tcp://127.0.0.1:9"),
}
def owner():
    results = [loop.run_until_complete(each) for each in (client.generate([2]), await_it())]
    told = [result.completions[0].token_ids.tolist() for result in results]
    loop.run_until_complete(client.close())
    return told
"""


def run(setup: str, endpoint: str, folder: Path) -> tuple[list[Any], Any]:
    """Run the script: what the forked process told, and its parent after it."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT.replace("SETUP", setup)]
    done = subprocess.run([*command, endpoint, folder], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    child, owner = map(json.loads, done.stdout.splitlines())
    return child, owner


def check_refusals(child: list[Any], names: int) -> None:
    """Every use is an error that names both processes."""
    owner, process, told = child
    assert len(told) >= names
    for name, outcome in told.items():
        assert outcome.startswith("RuntimeError"), (name, outcome)
        assert str(owner) in outcome and str(process) in outcome, (name, outcome)


def check_undisturbed(worker: ScriptedWorker) -> None:
    """Nothing of the parent was ended before its last request, which it sends after the fork."""
    ops = [header["op"] for header in worker.requests]
    # A request from before the fork may come later: its client looks only then whether it is connected.
    last = max(at for at, header in enumerate(worker.requests) if header.get("prompt") == [2])
    assert set(ops[:last]) <= {"generate"}


@pytest.fixture
def half_silent() -> Iterator[ScriptedWorker]:
    """Answers what its parent asks after the fork, and nothing before."""

    def answer(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["prompt"][-1] != 1:
            counting(worker, peer, header)

    worker = ScriptedWorker(only_generate(answer))
    yield worker
    worker.stop()


@pytest.mark.parametrize(("setup", "entries"), [(CLIENTS, 30), (ASYNCIO, 14)], ids=["blocking", "asyncio"])
def test_a_forked_client_is_an_error_at_once_and_its_parent_goes_on(
    half_silent: ScriptedWorker, tmp_path: Path, setup: str, entries: int
) -> None:
    child, owner = run(setup, half_silent.endpoint, tmp_path)
    check_refusals(child, entries)
    assert owner and all(tokens == [3, 4, 5, 6] for tokens in owner)
    assert len([header for header in half_silent.requests if header.get("prompt") == [2]]) == len(owner)
    check_undisturbed(half_silent)


def test_data_that_a_client_has_stays_readable_in_a_fork(half_silent: ScriptedWorker, tmp_path: Path) -> None:
    setup = f"""{CLIENTS}
entries = {{
    "endpoints": lambda: [client.endpoints, background.endpoints],
    "stream": lambda: [stream.endpoint, stream.partials(), stream.result, len(stream.id) > 0],
    "session": lambda: session.id,
    "repr": lambda: str([*map(repr, kept)])[:0],
    "own": lambda: RolloutClient(client.endpoints).generate([2]).completions[0].token_ids.tolist(),
}}
"""
    (_, _, told), owner = run(setup, half_silent.endpoint, tmp_path)
    place = half_silent.endpoint
    assert told["endpoints"] == repr([(place,), (place,)]) and told["stream"] == repr([place, [], None, True])
    assert told["session"] == "'talk'" and told["repr"] == "''" and told["own"] == "[3, 4, 5, 6]" and len(owner) == 3


def test_a_fork_does_not_hold_the_lock_of_a_journal(half_silent: ScriptedWorker, tmp_path: Path) -> None:
    code = """
client = RolloutClient(endpoint, journal=folder + "/journal")
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.write(ready[1], b"x")
    os.read(go[0], 1)
    os._exit(0)
os.read(ready[0], 1)
client.close()
RolloutClient(endpoint, journal=folder + "/journal").close()
os.write(go[1], b"x")
os.waitpid(child, 0)
entries, owner = {}, lambda: 1
"""
    run(code, half_silent.endpoint, tmp_path)


#: Each begins what a forked process leaves, by its end.
BLOCKS = {
    "with": """
with RolloutClient(endpoint) as client, client.session("talk") as talk, client.generate([1], stream="tokens") as stream:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    told = client.generate([2]).completions[0].token_ids.tolist()
""",
    "async with": """
async def main():
    async with AsyncRolloutClient(endpoint) as client:
        waiting = asyncio.create_task(client.generate_many([[1], [1]]))
        try:
            async with await client.generate([1], stream="tokens"), client.session("chat"):
                child = os.fork()
                if child == 0:
                    raise KeyError
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
                told = (await client.generate([2])).completions[0].token_ids.tolist()
                waiting.cancel()
                return told
        except KeyError:
            os._exit(7)
told = asyncio.run(main())
""",
    "for": """
client = RolloutClient(endpoint)
for settled in client.generate_as_completed([[2], [1]]):
    child = os.fork()
    if child == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    told = settled.unwrap().completions[0].token_ids.tolist()
    break
""",
    "background": """
with BackgroundClient(endpoint) as client:
    waiting = client.generate([1])
    child = os.fork()
    if child == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    told = client.generate([2]).result().completions[0].token_ids.tolist()
""",
}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_fork_that_only_ends_disturbs_nothing(half_silent: ScriptedWorker, tmp_path: Path, block: str) -> None:
    _, owner = run(f"{BLOCKS[block]}\nentries, owner = {{}}, lambda: told", half_silent.endpoint, tmp_path)
    assert owner == [3, 4, 5, 6]
    check_undisturbed(half_silent)


PUBLISHER = """
import torch
from trainer_bridge import WeightPublisher
publisher = WeightPublisher(endpoint, keep=True)
tensors = {"a": torch.zeros(4)}
update = publisher.publish(tensors, version=1)
kept += [publisher, update]
entries = {
    "publish": lambda: publisher.publish(tensors, version=2),
    "status": lambda: publisher.status(),
    "add": lambda: publisher.add("tcp://127.0.0.1:9"),
    "remove": lambda: publisher.remove(endpoint),
    "enter": lambda: publisher.__enter__(),
    "close": lambda: publisher.close(),
    "held": lambda: update.held(),
    "applied": lambda: update.applied(),
}
def owner():
    told = [outcome(update.applied), publisher.status()[0]["version"], update.version, publisher.endpoints]
    publisher.close()
    return told
"""


def test_a_forked_publisher_is_an_error_at_once_and_its_parent_goes_on(tmp_path: Path) -> None:
    with Worker() as worker:
        child, owner = run(PUBLISHER, worker.endpoint, tmp_path)
    check_refusals(child, 8)
    assert owner[0].startswith("WeightsRejected") and owner[1:] == [0, 1, [worker.endpoint]]


WORKER = f"""
worker = start_worker("m", command=(sys.executable, "-c", {FAKE_WORKER!r}))
kept += [worker]
entries = {{
    "stop": lambda: worker.stop(),
    "kill": lambda: worker.kill(),
    "wait_ready": lambda: worker.wait_ready(),
    "returncode": lambda: worker.returncode,
    "enter": lambda: worker.__enter__(),
}}
def owner():
    told = [worker.returncode, worker.log_path.exists(), worker.stop("now")]
    return told
"""


def test_a_forked_worker_can_be_reached_and_not_ended(tmp_path: Path) -> None:
    child, owner = run(WORKER, "", tmp_path)
    check_refusals(child, 5)
    assert owner == [None, True, 4]
    names = "worker.endpoint, worker.weights_endpoints, worker.pid, worker.pids, worker.model, worker.log_tail()"
    code = f"{WORKER}\nhere = repr(({names}))\nentries = {{'data': lambda: repr(({names})) == here}}"
    (_, _, told), owner = run(code, "", tmp_path)
    assert told == {"data": "True"} and owner == [None, True, 4]


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bound(half_silent: ScriptedWorker) -> Iterator[dict[str, Any]]:
    """An object of every kind."""
    place = half_silent.endpoint
    with (
        Worker() as receiver,
        RolloutClient(place) as client,
        BackgroundClient(place) as background,
        WeightPublisher(receiver.endpoint) as publisher,
        start_worker("m", command=(sys.executable, "-c", FAKE_WORKER)) as worker,
    ):
        asking = AsyncRolloutClient(place)
        answer = asking.generate([2])
        stream = client.generate([1], stream="tokens")
        yield {
            "client": client,
            "asyncio": asking,
            "answer": answer,
            "stream": stream,
            "session": client.session(),
            "async session": asking.session(),
            "background": background,
            "future": background.generate([1]),
            "publisher": publisher,
            "update": publisher.publish({"a": torch.zeros(4)}, version=1),
            "worker": worker,
        }
        answer.close()


COPIES: dict[str, Callable[[Any], Any]] = {"pickle": pickle.dumps, "copy": copy.copy, "deepcopy": copy.deepcopy}


def test_copies_are_refused_and_the_original_goes_on(bound: dict[str, Any]) -> None:
    for thing in bound.values():
        for way in COPIES.values():
            with pytest.raises(TypeError, match=type(thing).__name__):
                way(thing)
    assert bound["client"].generate([2]).completions[0].token_ids.tolist() == [3, 4, 5, 6]
    assert bound["background"].generate([2]).result(PATIENCE_S).completions[0].token_ids.tolist() == [3, 4, 5, 6]
    assert bound["worker"].returncode is None and bound["publisher"].status()[0]["version"] == 0


#: A client that reaches another process as an argument.
ARGUMENT = """
import multiprocessing, sys
from trainer_bridge import RolloutClient

def use(client):
    try:
        client.generate([2])
    except RuntimeError:
        sys.exit(3)

if __name__ == "__main__":
    client = RolloutClient(sys.argv[1])
    process = multiprocessing.get_context(sys.argv[2]).Process(target=use, args=(client,))
    try:
        process.start()
    except TypeError:
        print("TypeError")
    else:
        process.join()
        print(process.exitcode)
    print(client.generate([2]).completions[0].token_ids.tolist())
    client.close()
"""

LOADER = """
import sys, torch
from trainer_bridge import RolloutClient

class Drawn(torch.utils.data.Dataset):
    def __init__(self, client):
        self.client = client
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return self.client.generate([2]).completions[0].token_ids

if __name__ == "__main__":
    client = RolloutClient(sys.argv[1])
    try:
        list(torch.utils.data.DataLoader(Drawn(client), num_workers=1, multiprocessing_context=sys.argv[2]))
    except (TypeError, RuntimeError) as error:
        print(type(error).__name__)
    print(client.generate([2]).completions[0].token_ids.tolist())
    client.close()
"""


@pytest.mark.parametrize(
    ("code", "method", "told"),
    [
        (ARGUMENT, "fork", "3"),
        (ARGUMENT, "forkserver", "TypeError"),
        (ARGUMENT, "spawn", "TypeError"),
        (LOADER, "fork", "RuntimeError"),
        (LOADER, "spawn", "TypeError"),
    ],
)
def test_a_client_in_an_argument_of_another_process(
    half_silent: ScriptedWorker, tmp_path: Path, code: str, method: str, told: str
) -> None:
    script = tmp_path / "job.py"
    script.write_text(code)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", script, half_silent.endpoint, method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n", 1) == [told, "[3, 4, 5, 6]\n"]
