"""A whole worker that serves images, over its socket, held against transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models.images import ImagePrompt, logits_of, make_model, picture, prompt_with
from tests.support.worker.harness import assert_idle, launch
from trainer_bridge import BadRequest, MediaItem, MediaPrompt, RolloutClient, WeightPublisher
from trainer_bridge.client import core
from trainer_bridge.client.launch import WorkerProcess

NAME = "Qwen3-VL"


def sent(prompt: ImagePrompt) -> MediaPrompt:
    """The prompt as a trainer sends it."""
    media = [
        MediaItem(place, prompt.length(i), image.grid, image.pixels) for i, (place, image) in enumerate(prompt.places)
    ]
    return MediaPrompt(np.array(prompt.ids, np.int32), tuple(media))


def check(reference: Any, prompt: ImagePrompt, tokens: np.ndarray) -> None:
    logits = logits_of(reference, prompt, tokens.tolist())
    assert logits[len(prompt.ids) - 1 : -1].argmax(-1).tolist() == tokens.tolist()


def check_likely(reference: Any, prompt: ImagePrompt, tokens: np.ndarray) -> None:
    """As `check`, for many tokens: where two are equally likely within rounding, it may be either."""
    logits = logits_of(reference, prompt, tokens.tolist())[len(prompt.ids) - 1 : -1]
    drawn = logits.gather(-1, torch.from_numpy(tokens).long()[:, None])[:, 0]
    assert float((logits.max(-1).values - drawn).max()) < 1e-3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, list[Any]]]:
    """A worker, and the models whose weights it serves, by version."""
    folder = tmp_path_factory.mktemp("images")
    references = [make_model(NAME, folder / str(seed), seed) for seed in range(2)]
    each = 40 * 96 * 4  # bytes of an image of 4 x 10 patches
    flags = {"images": True, "max_rows": 4, "media_store_bytes": 3 * each}
    with launch(folder / "0", log=folder / "worker.log", **flags) as worker:
        yield worker, references


GREEDY: dict[str, Any] = {"temperature": 0.0, "stop": {"ignore_eos": True}, "timeout_s": 60.0}


def test_groups_sessions_streams_and_continuations(served: tuple[WorkerProcess, list[Any]]) -> None:
    worker, (reference, _) = served
    prompt = prompt_with(5, picture(4, 10), 4)
    with RolloutClient(worker.endpoint) as client:
        assert "media" in client.status()["capabilities"]
        group = client.generate(sent(prompt), n=3, max_tokens=8, **GREEDY)
        assert group.media == [item.hash for item in sent(prompt).media]
        for completion in group.completions:
            check(reference, prompt, completion.token_ids)
        turn = client.generate(sent(prompt), max_tokens=8, session="s", **GREEDY).completions[0]
        more = prompt_with(2, picture(2, 8, 1), 3, seed=1)
        second = ImagePrompt(prompt.ids + turn.token_ids.tolist(), list(prompt.places))
        second.places += [(len(second.ids) + place, image) for place, image in more.places]
        second.ids += more.ids
        next_prompt = sent(prompt).followed_by(turn.token_ids, sent(more))
        result = client.generate(next_prompt, max_tokens=8, session="s", **GREEDY)
        check(reference, second, result.completions[0].token_ids)
        assert result.cached_tokens >= len(prompt.ids)
        whole = result.completions[0]
        known = {"token_ids": whole.token_ids[:3], "seed": whole.seed}
        rest = client.generate(next_prompt, max_tokens=8, continue_from=known, **GREEDY).completions[0]
        assert rest.token_ids.tolist() == whole.token_ids.tolist()
        stream = client.generate(sent(prompt), max_tokens=8, stream="tokens", **GREEDY)
        assert sum(len(chunk.token_ids) for chunk in stream) == 8
        client.end_session("s")
    assert_idle(worker)


def test_images_that_the_store_has_dropped_are_sent_again(served: tuple[WorkerProcess, list[Any]]) -> None:
    worker, (reference, _) = served
    prompts = [prompt_with(3, picture(4, 10, seed), 2) for seed in range(20, 25)]
    with RolloutClient(worker.endpoint) as client:
        for prompt in prompts + prompts:
            check(reference, prompt, client.generate(sent(prompt), max_tokens=4, **GREEDY).completions[0].token_ids)
        results = client.generate_many([sent(prompt) for prompt in prompts[:3]] * 3, max_tokens=4, **GREEDY)
        for prompt, result in zip(prompts[:3] * 3, results, strict=True):
            check(reference, prompt, result.completions[0].token_ids)
    assert_idle(worker)


def test_large_images_go_ahead_of_their_request(
    served: tuple[WorkerProcess, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, (reference, _) = served
    monkeypatch.setattr(core, "_MOST_PIXEL_BYTES", 20_000)
    prompts = [prompt_with(3, picture(4, 10, seed), 1, picture(4, 10, seed + 1), 2) for seed in (40, 50, 40)]
    with RolloutClient(worker.endpoint) as client:
        for prompt in prompts:  # the store has dropped the first images when they are named again
            check(reference, prompt, client.generate(sent(prompt), max_tokens=4, **GREEDY).completions[0].token_ids)
    assert_idle(worker)


def test_an_error_names_the_item(served: tuple[WorkerProcess, list[Any]]) -> None:
    worker, _ = served
    prompt = sent(prompt_with(5, picture(4, 10), 4))
    with RolloutClient(worker.endpoint) as client, pytest.raises(BadRequest) as raised:
        client.generate(MediaPrompt(prompt.token_ids[::-1].copy(), prompt.media), max_tokens=4)
    assert raised.value.field == "media.0.offset"


def test_a_resuming_client_has_the_pixels_in_its_journal(
    served: tuple[WorkerProcess, list[Any]], tmp_path: Path
) -> None:
    worker, (reference, _) = served
    prompt = prompt_with(5, picture(4, 10, 30), 4)
    for _ in range(2):  # the second finds the result in the journal
        with RolloutClient(worker.endpoint, resume=True, journal=tmp_path / "journal") as client:
            result = client.generate(sent(prompt), n=2, max_tokens=8, request_id="r", **GREEDY)
            for completion in result.completions:
                check(reference, prompt, completion.token_ids)
    assert_idle(worker)


def test_updates_with_and_without_the_tower(served: tuple[WorkerProcess, list[Any]]) -> None:
    """The weights change, and in the end they are as before, for the tests that follow."""
    worker, (old, new) = served
    prompt = prompt_with(5, picture(4, 10), 4)
    ours = {name: tensor.detach() for name, tensor in new.named_parameters()}
    with RolloutClient(worker.endpoint) as client, WeightPublisher(worker.endpoint) as publisher:
        version = client.status()["weights_version"]
        publisher.publish(ours, version + 1).applied(60)
        check(new, prompt, client.generate(sent(prompt), max_tokens=8, **GREEDY).completions[0].token_ids)
        text = {name: tensor.detach() for name, tensor in old.named_parameters() if ".visual." not in name}
        publisher.publish(text, version + 2).applied(60)
        with torch.no_grad():
            for name, parameter in new.named_parameters():
                if ".visual." not in name:
                    parameter.copy_(text[name])
        check(new, prompt, client.generate(sent(prompt), max_tokens=8, **GREEDY).completions[0].token_ids)
        before = {name: tensor.detach() for name, tensor in old.named_parameters()}
        publisher.publish(before, version + 3).applied(60)
        check(old, prompt, client.generate(sent(prompt), max_tokens=8, **GREEDY).completions[0].token_ids)
    assert_idle(worker)


@pytest.mark.nightly
def test_completions_outlive_their_worker_and_their_trainer(
    served: tuple[WorkerProcess, list[Any]], tmp_path: Path
) -> None:
    """The worker that goes on has never seen the images, also if it has the place of the one that died."""
    worker, (reference, _) = served
    prompts = [prompt_with(5, picture(4, 10, seed), 4, picture(2, 8, seed + 1), 3) for seed in (60, 70)]
    flags = {"images": True, "max_rows": 4, "log": tmp_path / "log"}
    fields: dict[str, Any] = GREEDY | {"max_tokens": 440, "n": 3, "stream": "tokens", "timeout_s": 200.0}
    mortal, journal = launch(worker.model, **flags), {"resume": True, "journal": tmp_path / "journal"}
    try:
        with RolloutClient(mortal.endpoint, resume=True) as client:
            client.generate(sent(prompts[0]), max_tokens=1, **GREEDY)  # the client knows that its images are there
            place, stream = mortal.endpoint, client.generate(sent(prompts[0]), **fields)
            for i, _ in enumerate(stream):
                if i == 0:
                    mortal.kill()
                    mortal = launch(worker.model, bind=place, wait=False, **flags)
            assert stream.result.resumes > 0
            for completion in stream.result.completions:
                check_likely(reference, prompts[0], completion.token_ids)
        trainer = RolloutClient(place, **journal)
        next(iter(trainer.generate(sent(prompts[1]), request_id="left", **fields)))
        trainer.close()
    finally:
        mortal.kill()
    with RolloutClient(worker.endpoint, **journal) as client:
        assert client.journaled() == {"left": False}
        stream = client.generate(sent(prompts[1]), request_id="left", **fields)
        assert sum(len(chunk.token_ids) for chunk in stream) == 3 * 440
        for completion in stream.result.completions:
            check_likely(reference, prompts[1], completion.token_ids)
    assert_idle(worker)
