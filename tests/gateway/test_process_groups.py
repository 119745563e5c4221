"""Weights over a trainer's own process group, ordered over HTTP: a real worker, a gateway, and a trainer's process.

The trainer makes its group and broadcasts as SGLang's and AReaL's trainers do, with torch.distributed and gloo.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.demo.counting import check_completion
from rollout_gateway.http.http_errors import HttpError
from rollout_gateway.orders.process_groups import ProcessGroupUpdates
from tests.support.bridge.group_trainer import Trainer, trainer
from tests.support.gateway.harness import gateway, meet_by_gloo, post, refused
from tests.support.models.variants import make_variant
from tests.support.ports import free_port
from tests.support.worker.harness import ONES, TEXTS, TWOS, launch, tensors, until
from trainer_bridge.client.blocking import RolloutClient

FILES = {1: ONES / "model.safetensors", 2: TWOS / "model.safetensors"}
TEXT = {1: " 18 19", 2: " 19 21"}
UPDATE, JOIN, LEAVE = "/update_weights_from_distributed", "/init_weights_update_group", "/destroy_weights_update_group"


@pytest.fixture(scope="module")
def sender() -> Iterator[Trainer]:
    with trainer() as process:
        yield process


def counted(client: httpx.Client) -> str:
    text: str = post(client, "/v1/completions", {"prompt": "17:", "max_tokens": 6})["choices"][0]["text"]
    return text


def join(client: httpx.Client, sender: Trainer, name: str, path: str = JOIN, **more: Any) -> None:
    """Make a group of the trainer and the worker."""
    port = free_port()
    sender.join(port, 2, name)
    where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    assert post(client, path, where | {"group_name": name} | more | _port(path, port))["success"]
    assert sender.done() == {"ok": True}


def _port(path: str, port: int) -> dict[str, Any]:
    return {"master_port": str(port)} if "areal" in path else {}


def leave(client: httpx.Client, sender: Trainer, name: str) -> None:
    assert post(client, LEAVE, {"group_name": name})["success"]
    sender.start("leave", name=name)
    assert sender.done() == {"ok": True}


def told(step: int, names: list[str], group: str) -> dict[str, Any]:
    """What an update's request says of its tensors."""
    found = tensors(step)
    dtypes = [str(found[name].dtype).removeprefix("torch.") for name in names]
    return {
        "names": names,
        "dtypes": dtypes,
        "shapes": [list(found[name].shape) for name in names],
        "group_name": group,
    }


def test_updates_in_parts_while_requests_run(client: httpx.Client, direct: RolloutClient, sender: Trainer) -> None:
    names = sorted(tensors(1))
    first = direct.status()["weights_version"]
    steps = {first: 1}
    answers, over = [], threading.Event()

    def generate() -> None:
        body = {"prompt": "17:", "ignore_eos": True, "max_tokens": 100}
        asked = {"return_token_ids": True, "return_weight_versions": True}
        last = False  # one begins before the first update, and one after the last
        while not last:
            last = over.is_set()
            answers.append(post(client, "/v1/completions", body | asked)["choices"][0])

    join(client, sender, "parts")
    with ThreadPoolExecutor(1) as threads:
        generating = threads.submit(generate)
        until(lambda: answers or generating.done(), "the first answer")
        for number in range(1, 7):
            steps[first + number] = step = 1 + number % 2
            parts = [names] if number < 4 else [names[::2], names[1::2]]
            for part, some in enumerate(parts):
                more: dict[str, Any] = {"load_format": "flattened_bucket"} if number % 3 == 0 else {}
                more |= {"weight_version": str(first + number)} if number % 4 == 0 else {}
                sender.broadcast("parts", FILES[step], some, flat=number % 3 == 0)
                assert direct.status()["weights_version"] == first + number - 1
                body = told(step, some, "parts") | {"flush_cache": True, "abort_all_requests": True} | more
                assert post(client, UPDATE, body)["success"] and sender.done() == {"ok": True}
                if part + 1 < len(parts):
                    refused(client, "/continue_generation", {}, 409)
            assert direct.status()["weights_version"] == first + number
            assert client.get("/get_weight_version").json() == {"weight_version": str(first + number)}
            assert counted(client) == TEXT[step]
        over.set()
        generating.result()
    leave(client, sender, "parts")
    assert {choice["finish_reason"] for choice in answers} == {"length"}  # no request was aborted
    seen = set()
    for choice in answers:
        runs = [(run["version"], run["end"] - run["start"]) for run in choice["weight_versions"]]
        check_completion("17:", choice["token_ids"], runs, steps, TEXTS.__getitem__)
        seen |= {version for version, _ in runs}
    assert len(seen) > 1


def test_areals_names_and_a_paused_worker(client: httpx.Client, direct: RolloutClient, sender: Trainer) -> None:
    names, before = sorted(tensors(1)), direct.status()["weights_version"]
    refused(client, "/areal_update_weights_xccl", {}, 409)
    join(client, sender, "areal", "/areal_init_weights_update_group")
    for number, step in ((1, 2), (2, 1)):
        post(client, "/areal_pause_generation", {})
        for some in (names[:3], names[3:]):
            assert post(client, "/areal_set_update_weight_meta", told(step, some, "areal"))["success"]
            sender.broadcast("areal", FILES[step], some)
            assert post(client, "/areal_update_weights_xccl", {})["success"] and sender.done() == {"ok": True}
        post(client, "/areal_continue_generation", {})
        assert direct.status()["weights_version"] == before + number and counted(client) == TEXT[step]
    leave(client, sender, "areal")


def test_tensors_without_a_use_may_come_before_and_after_an_update(
    client: httpx.Client, direct: RolloutClient, sender: Trainer, tmp_path: Path
) -> None:
    names, before = sorted(tensors(1)), direct.status()["weights_version"]
    save_file({"mtp.fc.weight": torch.ones(3, 2)}, tmp_path / "extra.safetensors")
    extra = {"names": ["mtp.fc.weight"], "dtypes": ["float32"], "shapes": [[3, 2]], "group_name": "extra"}

    def send(file: Path, body: dict[str, Any]) -> None:
        sender.broadcast("extra", file, body["names"])
        assert post(client, UPDATE, body)["success"] and sender.done() == {"ok": True}

    join(client, sender, "extra")
    for number, step in ((1, 2), (2, 1)):
        post(client, "/pause_generation", {"mode": "retract"})
        send(tmp_path / "extra.safetensors", extra)
        assert direct.status()["weights_version"] == before + number - 1
        send(FILES[step], told(step, names[:3], "extra"))
        send(tmp_path / "extra.safetensors", extra)
        send(FILES[step], told(step, names[3:], "extra"))
        send(tmp_path / "extra.safetensors", extra)
        post(client, "/continue_generation", {})
        assert direct.status()["weights_version"] == before + number and counted(client) == TEXT[step]
    leave(client, sender, "extra")


def test_tensors_that_may_be_absent_may_come_last_during_a_pause(sender: Trainer, tmp_path: Path) -> None:
    """Correction biases of routers: an update is whole without them."""
    model = make_variant("Glm4Moe", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    biases = [name for name in weights if name.endswith("e_score_correction_bias")]
    names = [name for name in weights if name not in biases]
    for name in biases:
        weights[name] = torch.linspace(0.5, -0.5, 8)
        model.get_buffer(name).copy_(weights[name])
    save_file(weights, tmp_path / "new.safetensors")
    prompt = [5, 17, 40, 3, 22, 61]

    def send(client: httpx.Client, some: list[str]) -> None:
        sender.broadcast("late", tmp_path / "new.safetensors", some)
        body = {"names": some, "dtypes": ["float32"] * len(some), "shapes": [list(weights[n].shape) for n in some]}
        assert post(client, UPDATE, body | {"group_name": "late"})["success"] and sender.done() == {"ok": True}

    with (
        launch(tmp_path / "model", log=tmp_path / "log", dtype="float32", page_size=4, kv_pages=40) as worker,
        gateway([worker.endpoint]) as client,
        RolloutClient(worker.endpoint, timeout_s=60) as direct,
    ):
        join(client, sender, "late")
        for version, parts in ((1, [names, biases]), (2, [names]), (3, [names[:9], names[9:], biases[:1], biases[1:]])):
            post(client, "/pause_generation", {"mode": "retract"})
            for some in parts:
                send(client, some)
            post(client, "/continue_generation", {})
            assert direct.status()["weights_version"] == version
            found = direct.generate(prompt, max_tokens=12, temperature=0.0, stop={"ignore_eos": True}).completions[0]
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + found.token_ids.tolist()])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == found.token_ids.tolist()
        send(client, names)
        assert direct.status()["weights_version"] == 4  # without a pause it is in use at once
        post(client, "/pause_generation", {"mode": "retract"})
        send(client, names)
        send(client, names)  # these tensors belong to the next update
        assert direct.status()["weights_version"] == 5
        leave(client, sender, "late")
        assert direct.status()["weights_version"] == 6


def test_wrong_tensors_and_wrong_groups_leave_the_old_weights(
    client: httpx.Client, direct: RolloutClient, sender: Trainer, tmp_path: Path
) -> None:
    names, before, text = sorted(tensors(1)), direct.status()["weights_version"], counted(client)
    join(client, sender, "wrong")
    save_file({**tensors(2), "extra.weight": torch.ones(3)}, tmp_path / "more.safetensors")
    body = told(2, names, "wrong")
    sender.broadcast("wrong", tmp_path / "more.safetensors", [*names, "extra.weight"])
    extra = {"names": "extra.weight", "dtypes": "float32", "shapes": [3]}
    assert refused(client, UPDATE, body | {key: [*body[key], extra[key]] for key in extra}, 409) == "manifest"
    assert sender.done() == {"ok": True}
    save_file({**tensors(2), names[0]: tensors(2)[names[0]][1:].clone()}, tmp_path / "other.safetensors")
    shapes = [list(tensors(2)[names[0]][1:].shape), *body["shapes"][1:]]
    sender.broadcast("wrong", tmp_path / "other.safetensors", names)
    assert refused(client, UPDATE, body | {"shapes": shapes}, 409) == "manifest"
    assert sender.done() == {"ok": True}
    sender.broadcast("wrong", FILES[2], names)
    refused(client, UPDATE, body | {"weight_version": before}, 409)  # it is not newer
    assert sender.done() == {"ok": True}
    assert direct.status()["weights_version"] == before and counted(client) == text
    sender.broadcast("wrong", FILES[2], names)  # the group has stayed in step
    assert post(client, UPDATE, body)["success"] and sender.done() == {"ok": True}
    assert direct.status()["weights_version"] == before + 1 and counted(client) == TEXT[2]
    sender.broadcast("wrong", FILES[1], names)
    assert post(client, UPDATE, told(1, names, "wrong"))["success"] and sender.done() == {"ok": True}
    leave(client, sender, "wrong")
    refused(client, UPDATE, body, 404)
    refused(client, LEAVE, {"group_name": "wrong"}, 404)
    assert refused(client, UPDATE, body | {"dtypes": body["dtypes"][1:]}) == "dtypes"
    assert refused(client, UPDATE, body | {"load_format": "other"}) == "load_format"
    where = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    assert refused(client, JOIN, where | {"master_port": "x"}) == "master_port"
    assert refused(client, JOIN, where | {"rank_offset": 2}) == "world_size"
    assert refused(client, JOIN, where | {"backend": "nccl"}) == "meeting.backend"  # the worker runs on a CPU
    assert refused(client, JOIN, where | {"master_adress": ""}) == "master_adress"


def test_a_trainer_that_dies_in_the_middle(client: httpx.Client, direct: RolloutClient, sender: Trainer) -> None:
    names, before, text = sorted(tensors(1)), direct.status()["weights_version"], counted(client)
    with trainer() as doomed, ThreadPoolExecutor(1) as threads:
        join(client, doomed, "doomed")
        doomed.broadcast("doomed", FILES[1], names[:2])
        assert post(client, UPDATE, told(1, names[:2], "doomed"))["success"] and doomed.done() == {"ok": True}
        doomed.broadcast("doomed", FILES[1], names[2:4])  # of six that it says
        waiting = threads.submit(refused, client, UPDATE, told(1, names[2:], "doomed"), 409)
        assert doomed.done() == {"ok": True}
        doomed.process.kill()
        waiting.result()
    assert direct.status()["weights_version"] == before and counted(client) == text
    refused(client, UPDATE, told(1, names, "doomed"), 404)
    join(client, sender, "doomed")  # a trainer that was started again
    sender.broadcast("doomed", FILES[1], names)
    assert post(client, UPDATE, told(1, names, "doomed"))["success"] and sender.done() == {"ok": True}
    until(lambda: counted(client) == TEXT[1], "the new weights")
    leave(client, sender, "doomed")


def test_vllms_engine_needs_gpus_and_keeps_its_order(client: httpx.Client) -> None:
    """NCCL connects no CPU; `tests/bridge/transports/test_cuda_torch_group.py` has the engine."""
    assert client.get("/server_info").json()["vllm_config"]["weight_transfer_config"]["backend"] == "nccl"
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "packed": True}
    init = "/init_weight_transfer_engine"
    assert refused(client, init, {"init_info": info}) == "meeting.backend"
    assert refused(client, init, {"init_info": info | {"nccl_unique_id_b64": "AA=="}}) == "init_info.master_address"
    alone = {"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": "AA=="}
    assert refused(client, init, {"init_info": alone}) == "init_info.nccl_unique_id_b64"
    assert refused(client, init, {"init_info": info | {"rank": 1}}) == "init_info.rank"
    assert refused(client, init, {}) == "init_info"
    refused(client, "/start_weight_update", None, 409)
    refused(client, "/update_weights", {"update_info": {"names": [], "dtype_names": [], "shapes": []}}, 409)
    refused(client, "/finish_weight_update", {"weight_version": "7"}, 409)
    assert "down" in post(client, "/shutdown_weight_transfer_engine")["message"]


def test_vllms_calls_with_gloo_in_the_place_of_nccl(
    client: httpx.Client, direct: RolloutClient, sender: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the meeting is another one: it is changed on its way from the gateway to the worker."""
    meet_by_gloo(monkeypatch)
    names, before = sorted(tensors(1)), direct.status()["weights_version"]
    group, port = "vllm weight transfer", free_port()
    sender.join(port, 2, group)
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "packed": True}
    post(client, "/init_weight_transfer_engine", {"init_info": info | {"packed_num_buffers": 2}})
    assert sender.done() == {"ok": True}

    def update(step: int, some: list[str], flat: bool = True, **more: Any) -> None:
        body = told(step, some, group)
        given = {"names": body["names"], "dtype_names": body["dtypes"], "shapes": body["shapes"]} | more
        sender.broadcast(group, FILES[step], some, flat=flat)
        post(client, "/update_weights", {"update_info": given})
        assert sender.done() == {"ok": True}

    refused(client, "/update_weights", {"update_info": {}}, 409)
    post(client, "/start_weight_update", {})
    assert refused(client, "/update_weights", {"update_info": {}}) == "names"
    update(2, names)
    assert direct.status()["weights_version"] == before  # until the update is finished
    assert post(client, "/finish_weight_update")["weight_version"] == str(before + 1) and counted(client) == TEXT[2]
    post(client, "/start_weight_update", {"is_checkpoint_format": True})
    update(1, names, names=[], dtype_names=[], shapes=[])  # the same tensors as before
    post(client, "/finish_weight_update", {"weight_version": str(before + 5)})
    assert client.get("/weight_info").json() == {"weight_version": before + 5} and counted(client) == TEXT[1]
    post(client, "/start_weight_update", {})
    for name in names[1:]:  # one tensor a call, as TRL has it
        update(2, [name], flat=False, packed=False)
    refused(client, "/finish_weight_update", {}, 409)
    refused(client, "/finish_weight_update", {}, 409)
    assert direct.status()["weights_version"] == before + 5 and counted(client) == TEXT[1]
    update(2, names[:1], flat=False, packed=False)  # what it lacked
    post(client, "/finish_weight_update", {})
    assert direct.status()["weights_version"] == before + 6 and counted(client) == TEXT[2]
    refused(client, "/update_weights", {"update_info": {}}, 409)
    post(client, "/start_weight_update", {})
    update(1, names[:1])  # dropped by the next start
    post(client, "/start_weight_update", {})
    update(2, names[:2])
    update(2, names[2:])
    post(client, "/finish_weight_update", {})
    assert counted(client) == TEXT[2]
    post(client, "/start_weight_update", {})
    update(1, names)
    post(client, "/finish_weight_update", {})
    assert direct.status()["weights_version"] == before + 8 and counted(client) == TEXT[1]
    rpc = "/collective_rpc"  # SkyRL's names for the same calls
    assert post(client, rpc, {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}})
    sender.broadcast(group, FILES[2], names, flat=True)
    told_nccl = told(2, names, group)
    info = {"names": names, "dtype_names": told_nccl["dtypes"], "shapes": told_nccl["shapes"], "packed": True}
    post(client, rpc, {"method": "update_weights_nccl", "kwargs": {"update_info": info}})
    assert sender.done() == {"ok": True}
    assert direct.status()["weights_version"] == before + 8
    post(client, rpc, {"method": "skyrl_finish_weight_update"})
    assert direct.status()["weights_version"] == before + 9 and counted(client) == TEXT[2]
    post(client, "/start_weight_update", {})
    update(1, names)
    post(client, "/finish_weight_update", {})
    post(client, "/shutdown_weight_transfer_engine")
    refused(client, "/start_weight_update", {}, 409)
    for method in ("skyrl_start_weight_update", "skyrl_finish_weight_update"):
        refused(client, rpc, {"method": method}, 409)
    wrong = {"method": "update_weights_nccl", "kwargs": {"update_info": {"name": []}}}
    assert refused(client, rpc, wrong) == "kwargs.update_info.name"
    assert refused(client, rpc, {"method": "update_weights_ipc", "kwargs": {"update_info": {}}}) == "method"
    sender.start("leave", name=group)
    assert sender.done() == {"ok": True}


@pytest.mark.nightly
def test_two_workers_take_their_ranks_and_swap_together(sender: Trainer, tmp_path: Path) -> None:
    names, port = sorted(tensors(1)), free_port()
    with (
        launch(log=tmp_path / "one") as one,
        launch(log=tmp_path / "two") as two,
        gateway([one.endpoint, two.endpoint], update_s=20) as client,
    ):
        sender.join(port, 3, "two")
        where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3}
        assert refused(client, JOIN, where | {"backend": "gloo", "world_size": 2}) == "world_size"
        assert post(client, JOIN, where | {"backend": "gloo", "group_name": "two"})["success"]
        assert sender.done() == {"ok": True}
        for version, step in ((1, 2), (2, 1), (3, 2)):
            for some in (names[:5], names[5:]):
                sender.broadcast("two", FILES[step], some)
                assert post(client, UPDATE, told(step, some, "two"))["success"] and sender.done() == {"ok": True}
            assert client.get("/weight_info").json() == {"weight_version": version}
            assert [counted(client) for _ in range(4)] == [TEXT[step]] * 4
        os.kill(two.pid, signal.SIGKILL)
        sender.broadcast("two", FILES[1], names)
        assert client.post(UPDATE, json=told(1, names, "two")).status_code >= 400
        sender.done()
        assert counted(client) == TEXT[2]
        with RolloutClient(one.endpoint) as direct:
            assert direct.status()["weights_version"] == 3

        def unhealthy() -> str:
            found: str = client.get("/health").json()["unhealthy"].get(two.endpoint, "")
            return found

        with launch(log=tmp_path / "again", bind=two.endpoint):
            until(lambda: "process group" in unhealthy(), "what an operator can do")
            gone = {"group_name": "two"}  # the other worker may still wait for its broadcast
            until(lambda: client.post(LEAVE, json=gone).status_code in (200, 404), "the end of the group")
            port = free_port()
            sender.join(port, 3, "again")
            assert post(client, JOIN, where | {"master_port": port, "backend": "gloo", "group_name": "again"})[
                "success"
            ]
            assert sender.done() == {"ok": True}
            sender.broadcast("again", FILES[2], names)
            late = told(2, names, "again") | {"weight_version": 3}  # the other worker has it
            assert post(client, UPDATE, late)["success"] and sender.done() == {"ok": True}
            assert client.get("/weight_info").json() == {"weight_version": 3} and not unhealthy()
            assert [counted(client) for _ in range(4)] == [TEXT[2]] * 4


class SlowPool:
    """One worker whose parts end when the test says so."""

    endpoints = ("tcp://worker",)

    def __init__(self) -> None:
        self.gathers, self.end = asyncio.Event(), asyncio.Event()

    async def control(self, what: str, action: str, **message: Any) -> list[dict[str, Any]]:
        if action == "gather":
            self.gathers.set()
            await self.end.wait()
            return [{"gathered": True, "missing": ["b"], "left_out": []}]
        return [{"left": True}]


@pytest.mark.parametrize("order", ["join", "leave"])
def test_a_part_that_ends_after_its_group_was_left_begins_no_update(order: str) -> None:
    async def run() -> None:
        pool = SlowPool()
        updates = ProcessGroupUpdates(pool, None, 5)  # type: ignore[arg-type]
        part = asyncio.create_task(updates.gather("g", [["a", "float32", [1]]], None))
        await pool.gathers.wait()
        await (updates.join("g", {}, 1, 2) if order == "join" else updates.leave("g"))
        pool.end.set()
        with pytest.raises(HttpError, match="send it again"):
            await part
        assert not updates.begun

    asyncio.run(run())


def test_the_first_rank_of_workers_is_named_if_it_is_the_trainers(client: httpx.Client) -> None:
    where = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2, "backend": "gloo"}
    answer = client.post(JOIN, json=where | {"rank_offset": 0, "group_name": "g"})
    assert answer.status_code == 400 and "rank_offset is 0: use 1 or more" in answer.text
