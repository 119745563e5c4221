"""Images in `generate` messages: they travel once, are named by their hash, and every wrong item is named."""

from typing import Any

import numpy as np
import pytest

from rollout.engine.messages.prompts import Media
from tests.support.service.harness import Bench, Client, serving
from tests.support.service.media import PLACEHOLDER, TOWER, WITH_IMAGES, by_name, item_of, pixels_of, prompt_for
from trainer_bridge.wire.media_hash import media_hash


def send(client: Client, request_id: str, *items: dict[str, Any], **fields: Any) -> None:
    given = {"prompt": prompt_for(*items), "media": list(items), "max_tokens": 3}
    client.send("generate", request_id, **(given | fields))


def accepted(bench: Bench, client: Client, request_id: str, *items: dict[str, Any], **fields: Any) -> Any:
    """The engine's request; it ends at once."""
    send(client, request_id, *items, **fields)
    request = bench.submitted()
    bench.finish(request)
    reply = client.receive()
    assert reply["op"] == "result" and reply["media"] == [item["hash"] for item in items]
    return request


def test_a_prompt_has_its_images_as_items_and_the_reply_echoes_their_hashes() -> None:
    items = item_of(2), item_of(4, (1, 4, 2), 1), item_of(9, (1, 2, 2), 2)
    with serving(model=WITH_IMAGES) as bench:
        prompt = accepted(bench, bench.client(), "a", *items).prompt
    assert prompt.token_ids.tolist() == prompt_for(*items)
    assert [place for place, _ in prompt.media] == [2, 4, 9]
    assert [type(item) is Media for item in prompt.items] == [False, True, True, False, True, False]
    for (_, item), sent in zip(prompt.media, items, strict=True):
        assert np.array_equal(item.pixels.patches, sent["pixel_values"]) and item.pixels.grid == tuple(sent["grid_thw"])
    #  text 0 1, image of 1 x 2, image of 2 x 1, text, image of 1 x 1, text
    assert prompt.rope_3T.tolist() == [
        [0, 1, 2, 2, 4, 4, 6, 7, 8, 9, 10, 11],
        [0, 1, 2, 2, 4, 5, 6, 7, 8, 9, 10, 11],
        [0, 1, 2, 3, 4, 4, 6, 7, 8, 9, 10, 11],
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_pixels_may_be_of_three_types(dtype: type) -> None:
    pixels = pixels_of((1, 2, 4))
    pixels = (pixels.view(np.uint32) >> 16).astype(np.uint16) if dtype is np.uint16 else pixels.astype(dtype)
    item = item_of(2, pixel_values=pixels, hash=media_hash(pixels, (1, 2, 4)))
    with serving(model=WITH_IMAGES) as bench:
        request = accepted(bench, bench.client(), "a", item)
    assert np.array_equal(request.prompt.media[0][1].pixels.patches, pixels)


def test_an_image_that_was_sent_once_is_named_afterwards_by_any_client() -> None:
    item = item_of(2)
    with serving(model=WITH_IMAGES) as bench:
        first, second = bench.client(), bench.client()
        send(first, "a", item)
        send(first, "b", by_name(item))  # while the first is being prepared
        requests = [bench.submitted(), bench.submitted()]
        for request in requests:
            bench.finish(request)
            assert first.receive()["op"] == "result"
        requests.append(accepted(bench, second, "c", by_name(item)))
    pieces = {id(request.prompt.media[0][1].pixels) for request in requests}
    assert len(pieces) == 1, "one copy"


def test_images_may_come_ahead_of_their_request() -> None:
    items = [item_of(2, seed=0), item_of(5, seed=1)]
    with serving(model=WITH_IMAGES) as bench:
        client = bench.client()
        client.send("media", "pieces", media=items)
        accepted_after = [by_name(item) for item in items]
        send(client, "a", *accepted_after)  # before the answer
        assert client.receive()["op"] == "ok"
        request = bench.submitted()
        bench.finish(request)
        assert client.receive()["op"] == "result" and len(request.prompt.media) == 2
        for wrong, field in (
            (by_name(items[0]), "pixel_values"),
            (items[0] | {"hash": "0" * 64}, "hash"),
            (items[0] | {"grid_thw": [1, 2, 2]}, "length"),
        ):
            error = client.ask("media", "wrong", media=[wrong])
            assert (error["code"], error["field"]) == ("bad_request", f"media.0.{field}"), error
    with serving() as bench:
        assert bench.client().ask("media", "a", media=items)["field"] == "media"


def test_a_worker_says_which_images_it_needs() -> None:
    known, unknown = item_of(2), item_of(5, seed=1)
    with serving(model=WITH_IMAGES) as bench:
        client = bench.client()
        send(client, "a", known, by_name(unknown))
        error = client.receive()
        assert (error["code"], error["need"]) == ("media_needed", [unknown["hash"]])
        accepted(bench, client, "a", by_name(known), unknown)


def test_the_same_request_with_and_without_pixels_is_one_request() -> None:
    item = item_of(2)
    with serving(model=WITH_IMAGES) as bench:
        client = bench.client()
        send(client, "a", item)
        request = bench.submitted()
        send(client, "a", by_name(item))
        bench.finish(request)
        assert [client.receive()["op"] for _ in range(2)] == ["result", "result"]
        send(client, "a", item_of(2, seed=1))
        assert client.receive()["code"] == "duplicate"


def test_the_store_keeps_what_is_in_use_and_drops_what_was_used_longest_ago() -> None:
    items = [item_of(2, seed=seed) for seed in range(4)]
    each = items[0]["pixel_values"].nbytes
    with serving(model=WITH_IMAGES, media_store_bytes=2 * each) as bench:
        client = bench.client()
        for i in range(3):
            accepted(bench, client, f"first{i}", items[i])
        send(client, "gone", by_name(items[0]))
        assert client.receive()["need"] == [items[0]["hash"]]
        running = []
        for i in (1, 2):
            send(client, f"running{i}", by_name(items[i]))
            running.append(bench.submitted())
        send(client, "more", items[3])
        error = client.receive()
        assert error["code"] == "overloaded" and error["retry_after_s"] > 0
        bench.finish(running[0])
        assert client.receive()["op"] == "result"
        accepted(bench, client, "more", items[3])


GOOD = item_of(2)
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "grid of odd height": (item_of(2) | {"grid_thw": [1, 3, 4]}, "grid_thw", "multiples of 2"),
    "grid of two sizes": (item_of(2) | {"grid_thw": [2, 4]}, "grid_thw", "three integers"),
    "grid of 0": (item_of(2) | {"grid_thw": [1, 0, 4]}, "grid_thw", "from 1"),
    "grid of text": (item_of(2) | {"grid_thw": "124"}, "grid_thw", "three integers"),
    "huge grid": (item_of(2) | {"grid_thw": [1, 1 << 20, 1 << 20]}, "grid_thw", "patches"),
    "several frames": (item_of(2, (2, 2, 4)), "grid_thw", "one frame"),
    "wrong length": (item_of(2) | {"length": 3}, "length", "takes 2 tokens"),
    "past the end": (item_of(2) | {"offset": 11}, "length", "after the prompt's 12"),
    "other tokens": (item_of(2) | {"offset": 5}, "offset", "placeholders"),
    "negative offset": (item_of(2) | {"offset": -1}, "offset", "greater"),
    "another hash": (item_of(2) | {"hash": "0" * 64}, "hash", "compute it anew"),
    "short hash": (item_of(2) | {"hash": "0" * 63}, "hash", "pattern"),
    "hash of bytes": (item_of(2) | {"hash": b"0" * 64}, "hash", "string"),
    "integers": (item_of(2) | {"pixel_values": np.zeros((8, 8), np.int32)}, "pixel_values", "not int32"),
    "float64": (item_of(2) | {"pixel_values": np.zeros((8, 8))}, "pixel_values", "not float64"),
    "a list": (item_of(2) | {"pixel_values": [[0.0]]}, "pixel_values", "not list"),
    "another shape": (item_of(2) | {"pixel_values": np.zeros((7, 8), np.float32)}, "pixel_values", r"shape \[8, 8\]"),
    "time of nan": (item_of(2) | {"seconds_per_frame": float("nan")}, "seconds_per_frame", "finite"),
    "another field": (item_of(2) | {"url": "x"}, "url", "unknown"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_item_is_named(case: str) -> None:
    item, field, says = WRONG[case]
    with serving(model=WITH_IMAGES) as bench:
        client = bench.client()
        client.send("generate", "a", prompt=prompt_for(GOOD, item_of(6)), media=[item], max_tokens=3)
        error = client.receive()
        assert (error["code"], error["field"]) == ("bad_request", f"media.0.{field}"), error
        with pytest.raises(AssertionError, match=says):
            raise AssertionError(error["message"])
        accepted(bench, client, "b", GOOD)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_a_value_that_would_spread_in_the_kv_is_refused(value: float, dtype: type) -> None:
    pixels = pixels_of((1, 2, 4))
    pixels[3, 5] = value
    if dtype is np.uint16:
        pixels = (pixels.view(np.uint32) >> 16).astype(np.uint16)
    with serving(model=WITH_IMAGES) as bench:
        client = bench.client()
        send(client, "a", item_of(2, pixel_values=pixels, hash=media_hash(pixels, (1, 2, 4))))
        assert client.receive()["field"] == "media.0.pixel_values"


def test_items_must_not_overlap_and_not_be_too_many() -> None:
    with serving(model=WITH_IMAGES, max_media=2, max_media_patches=20) as bench:
        client = bench.client()
        send(client, "a", item_of(4), item_of(3, seed=1))
        assert client.receive()["field"] == "media.1.offset"
        send(client, "a", item_of(1, (1, 2, 2)), item_of(3, (1, 2, 2)), item_of(5, (1, 2, 2)))
        assert client.receive()["field"] == "media"
        send(client, "a", item_of(1, (1, 2, 8)), item_of(6, (1, 2, 8)))
        assert "patches" in client.receive()["message"]


def test_placeholders_without_an_image_are_refused() -> None:
    with serving(model=WITH_IMAGES) as bench:
        client = bench.client()
        client.send("generate", "a", prompt=[1, PLACEHOLDER, 2], max_tokens=3)
        assert (error := client.receive())["code"] == "bad_request" and error["field"] == "prompt"
        client.send("generate", "b", prompt=[*prompt_for(GOOD), PLACEHOLDER], media=[GOOD], max_tokens=3)
        assert client.receive()["field"] == "media"


def test_a_worker_of_text_refuses_images_and_takes_all_tokens(codec: Any) -> None:
    with serving() as bench:
        client = bench.client()
        send(client, "a", GOOD)
        assert (error := client.receive())["field"] == "media" and "model.images" in error["message"]
        client.send("generate", "b", prompt=[1, PLACEHOLDER, 2], max_tokens=3)
        bench.finish(bench.submitted())
        assert client.receive()["op"] == "result"
    with serving(codec, model=WITH_IMAGES) as bench:
        client = bench.client()
        client.send("generate", "a", prompt="text", media=[GOOD], max_tokens=3)
        assert client.receive()["field"] == "prompt"


def test_capabilities_name_media() -> None:
    with serving(model=WITH_IMAGES) as bench:
        assert "media" in bench.client().ask("status")["capabilities"]
    with serving() as bench:
        assert "media" not in bench.client().ask("status")["capabilities"]


def test_frames_of_a_video_are_further_apart_the_more_time_is_between_them() -> None:
    from dataclasses import replace

    tower = replace(TOWER, tokens_per_second=2)
    axes, advance = tower.positions((3, 2, 4), 1.5)
    assert axes.tolist() == [[0, 0, 3, 3, 6, 6], [0] * 6, [0, 1] * 3] and advance == 2
