"""Which worker of a fleet gets a request, and workers that join, leave, and come back with old weights."""

from typing import Any

import numpy as np
import pytest

from tests.support.bridge.client_script import Connect, Serve, only_generate, silent
from tests.support.bridge.model_script import Model, check
from tests.support.bridge.scripted_worker import ScriptedWorker, counting
from tests.support.worker.harness import until
from trainer_bridge.client.generate_request import plan_request
from trainer_bridge.client.placement import Fleet, prompt_blocks
from trainer_bridge.client.resumed_call import completion_seed
from trainer_bridge.wire import errors

PROMPT, OTHER = list(range(200)), list(range(500, 700))
SEED = 11


def sends(fleet: Fleet, prompt: Any, load: int = 0, gone: tuple[str, ...] = (), **fields: Any) -> str:
    """Where a request goes; `load` completions of it stay in flight."""
    endpoint = fleet.choose(plan_request(prompt, fields), gone)
    fleet[endpoint].load += load
    return endpoint


# --- prefixes --------------------------------------------------------------------------------------------------------


def test_a_known_prompt_goes_to_a_worker_that_holds_it_and_a_new_one_to_the_least_loaded() -> None:
    fleet = Fleet("abc")
    first = sends(fleet, PROMPT, 1)
    assert [sends(fleet, PROMPT, 1) for _ in range(5)] == [first] * 5
    assert sends(fleet, OTHER, 1) != first
    assert sends(fleet, PROMPT[:150] + OTHER[:50]) == first, "three quarters of it are known"
    assert sends(fleet, PROMPT[:64] + OTHER[:136]) != first, "most of it is new"
    assert sends(fleet, PROMPT, adapter="chess") != first, "an adapter's KV is another one"


def test_a_worker_that_has_far_more_to_do_than_another_does_not_keep_its_prompts() -> None:
    fleet = Fleet("ab")
    places = [sends(fleet, PROMPT, 8) for _ in range(40)]
    loads = [fleet[endpoint].load for endpoint in "ab"]
    assert set(places) == {"a", "b"} and abs(loads[0] - loads[1]) <= 24, loads
    assert places[1] == places[0]


def test_of_the_workers_that_hold_a_prompt_the_least_loaded_gets_it() -> None:
    fleet = Fleet("abc")
    for endpoint in "ab":
        sends(fleet, PROMPT, endpoint=endpoint)
    fleet["a"].load, fleet["b"].load, fleet["c"].load = 5, 4, 0
    assert sends(fleet, PROMPT) == "b"


def test_a_short_prompt_and_one_whose_worker_is_gone_go_by_load() -> None:
    fleet = Fleet("ab")
    assert {sends(fleet, PROMPT[:63], 1) for _ in range(2)} == {"a", "b"}
    first = sends(fleet, OTHER)
    fleet.mark_lost(first)
    assert sends(fleet, OTHER, gone=(first,)) != first


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ({"prompt": np.arange(300, dtype=np.int32)}, {"prompt": np.arange(130, dtype=np.int32)}),
        ({"prompt": "é" * 400}, {"prompt": "é" * 260}),
        (
            {"messages": [{"role": "user", "content": "x" * 600}, {"role": "assistant", "content": "y"}]},
            {"messages": [{"role": "user", "content": "x" * 600}]},
        ),
    ],
)
def test_prompts_with_the_same_beginning_have_the_same_first_blocks(whole: Any, part: Any) -> None:
    keys = prompt_blocks(part)
    assert keys and prompt_blocks(whole)[: len(keys)] == keys
    assert prompt_blocks({**part, "adapter": "chess"})[0] != keys[0]


# --- newcomers -------------------------------------------------------------------------------------------------------


def test_a_newcomer_is_used_once_it_has_the_weights_of_the_others() -> None:
    fleet = Fleet("ab")
    assert fleet.add("c") and fleet.newcomers == ["c"]
    assert "c" not in {sends(fleet, [i], 1) for i in range(9)}
    fleet.admit_newcomers({"a": 7, "b": 6, "c": 6})
    assert fleet.newcomers == ["c"]
    fleet.admit_newcomers({"a": 7, "b": 6, "c": 7})
    assert not fleet.newcomers and sends(fleet, [1]) == "c"


def test_newcomers_are_used_if_there_is_no_other_worker_and_the_newest_weights_count() -> None:
    fleet = Fleet("ab")
    fleet.mark_lost("a"), fleet.mark_lost("b")
    assert {sends(fleet, [i], 1) for i in range(4)} == {"a", "b"}
    fleet.admit_newcomers({"a": 3, "b": 5})
    assert fleet.newcomers == ["a"]


def with_version(version: list[int]) -> Any:
    """A worker whose `status` has the version that is in the list by then."""

    def handle(worker: ScriptedWorker, peer: bytes, header: dict[str, Any]) -> None:
        if header["op"] == "status":
            worker.reply(peer, header, {"op": "status", "state": "serving", "weights_version": version[0]})
        else:
            counting(worker, peer, header)

    return handle


def test_a_worker_that_is_added_gets_requests_once_its_weights_are_current(connect: Connect, serve: Serve) -> None:
    version = [2]
    there, late = serve(), serve(with_version(version))  # the first has version 3
    client = connect(there.endpoint)
    client.add(late.endpoint)
    assert client.endpoints == (there.endpoint, late.endpoint)
    client.ping()
    until(lambda: client.ping() or any(seen["op"] == "status" for seen in late.requests), "the question")
    assert {client.generate([i]).endpoint for i in range(8)} == {there.endpoint}
    version[0] = 3
    until(lambda: client.generate([1]).endpoint == late.endpoint, "the newcomer's first request")
    with pytest.raises(ValueError, match="already"):
        client.add(late.endpoint)


def test_a_worker_that_comes_back_with_old_weights_gets_nothing(connect: Connect, serve: Serve) -> None:
    first, second = serve(), serve()
    client = connect(first.endpoint, second.endpoint)
    client.ping()
    second.stop()
    with pytest.raises((errors.ConnectionLost, errors.RolloutTimeout)):
        client.ping(endpoint=second.endpoint, timeout_s=0.5)
    again = serve(with_version([0]), endpoint=second.endpoint)
    client.ping()
    assert {client.generate([i]).endpoint for i in range(6)} == {first.endpoint}
    assert client.generate([1], endpoint=again.endpoint).endpoint == again.endpoint, "unless it is named"


# --- leaving ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_removed_ends_what_it_has_and_gets_nothing_new(connect: Connect, serve: Serve) -> None:
    held: list[Any] = []
    first = serve(only_generate(lambda worker, peer, header: held.append((peer, header))))
    second = serve()
    client = connect(first.endpoint, second.endpoint)
    client.ping()
    running = client.generate([1], stream="tokens", endpoint=first.endpoint)
    home = client.generate([1], session="s", endpoint=second.endpoint).endpoint
    client.remove(first.endpoint)
    assert client.endpoints == (second.endpoint,) and list(client.statuses()) == [second.endpoint]
    assert {client.generate([i]).endpoint for i in range(4)} == {home}
    until(lambda: held, "the request")
    first.do(lambda: counting(first, *held[0]))
    assert running.wait().completions[0].token_ids.tolist() == [2, 3, 4, 5]
    client.ping()
    with pytest.raises(ValueError, match="not an endpoint"):
        client.ping(endpoint=first.endpoint)
    with pytest.raises(ValueError, match="last endpoint"):
        client.remove(second.endpoint)


def test_a_worker_that_is_leaving_can_be_kept(connect: Connect, serve: Serve) -> None:
    first, second = serve(only_generate(silent)), serve(only_generate(silent))
    client = connect(first.endpoint, second.endpoint)
    client.ping()
    client.generate([1], stream="tokens", endpoint=first.endpoint)
    client.remove(first.endpoint)
    client.add(first.endpoint)
    assert set(client.endpoints) == {first.endpoint, second.endpoint}
    assert {client.generate([1], stream="tokens").endpoint for _ in range(3)} == {first.endpoint, second.endpoint}


def test_removed_at_once_a_workers_requests_fail_and_end_there(connect: Connect, serve: Serve) -> None:
    first, second = serve(only_generate(silent)), serve()
    client = connect(first.endpoint, second.endpoint)
    client.ping()
    stream = client.generate([1], stream="tokens", endpoint=first.endpoint)
    client.ping()
    client.remove(first.endpoint, "now")
    with pytest.raises(errors.ConnectionLost, match="removed"):
        stream.wait()
    assert first.next("cancel")["target"] == stream.id
    with pytest.raises(ValueError, match="mode"):
        client.remove(second.endpoint, "soon")


def test_with_resume_they_continue_elsewhere_and_so_does_their_session(connect: Connect, serve: Serve) -> None:
    first, second = serve(Model(3, reach=(4,), fail=silent)), serve(Model(4))
    client = connect(first.endpoint, resume=True)
    stream = client.generate([1], max_tokens=8, seed=SEED, stream="tokens", session="s")
    seen = [next(stream) for _ in range(2)]
    client.add(second.endpoint)
    client.remove(first.endpoint, "now")
    seen += list(stream)
    assert sum(len(chunk.token_ids) for chunk in seen) == 8
    check(stream.result.completions[0], completion_seed(SEED, 0), 8, [(3, 4), (4, 4)])
    assert stream.endpoint == client.generate([1], max_tokens=2, seed=SEED, session="s").endpoint == second.endpoint
