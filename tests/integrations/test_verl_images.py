"""verl 0.9 with images: its replicas, agent loop and checkpoint manager, on tiny models of text and images."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("verl") is None or importlib.util.find_spec("ray") is None:
    pytest.skip("verl is not installed: pip install '.[verl]'", allow_module_level=True)

import ray
import torch
from PIL import Image
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager

from tests.support.integrations import verl_drawn, verl_vision
from tests.support.integrations.verl_parts import compose_config, start_ray, trainer_ranks
from tests.support.integrations.verl_vision import Qwen3VLProcessor, make_vision_checkpoint, patches_of
from tests.support.models.images import IMAGE, SINGLE_FRAMES, VIDEO, ImagePrompt, Picture, logits_of
from trainer_bridge.integrations.verl import CheckpointManager
from trainer_bridge.integrations.verl_media import MediaProcessor, ProcessorSource

pytestmark = pytest.mark.timeout(900)
NAMES = ("Qwen3-VL", "Qwen2.5-VL")
FLAGS = {"images": "true", "media_store_bytes": 1_000_000}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
NUMBERS = itertools.count()


def drawn(width: int, height: int, seed: int) -> Image.Image:
    """A picture of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def vision_config(folder: Path) -> Any:
    rollout = "actor_rollout_ref.rollout"
    return compose_config(
        folder,
        f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node=1",
        f"{rollout}.checkpoint_engine.backend=rollout",
        f"{rollout}.prompt_length=96",
        f"{rollout}.response_length=24",
        f"{rollout}.calculate_log_probs=True",
        f"actor_rollout_ref.model.external_lib={verl_vision.NAME}",
        f"data.custom_cls.path={verl_drawn.__file__}",
        "data.custom_cls.name=Drawn",
        *(f"+{rollout}.engine_kwargs.rollout.{name}={value}" for name, value in FLAGS.items()),
    )


@pytest.fixture(scope="module", params=NAMES)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, Any, LLMServerManager]]:
    """The name of a model, transformers' model, verl's configuration and its server manager."""
    folder = tmp_path_factory.mktemp("verl") / "model"
    model = make_vision_checkpoint(request.param, folder)
    config = vision_config(folder)
    start_ray(gpus=1)
    try:
        servers = LLMServerManager.create(config=config)
        ranks = trainer_ranks(folder, 1)
        manage(servers, ranks, config).update_weights(1)
        yield request.param, (model, ranks), config, servers
    finally:
        ray.shutdown()


def manage(servers: LLMServerManager, ranks: Any, config: Any) -> CheckpointManager:
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    return CheckpointManager(engine, ranks, servers.get_replicas())


def generate(servers: LLMServerManager, prompt_ids: list[int], count: int = 1, **data: Any) -> list[Any]:
    """Completions by verl's own client."""
    asking, numbers = servers.get_client(), [next(NUMBERS) for _ in range(count)]
    params = SAMPLING | {"max_tokens": 12, "ignore_eos": True}

    async def all_of_them() -> list[Any]:
        calls = [asking.generate(f"c{i}", prompt_ids=prompt_ids, sampling_params=dict(params), **data) for i in numbers]
        return await asyncio.gather(*calls)

    return asyncio.run(all_of_them())


def processed(picture: Image.Image, model: Any) -> Picture:
    """The picture as the trainer's processor returns it."""
    found = Qwen3VLProcessor.from_pretrained(model.name_or_path)([picture], ["<image>"], return_tensors="pt")
    return Picture(tuple(found["image_grid_thw"][0].tolist()), found["pixel_values"].numpy())


def append(prompt: ImagePrompt, picture: Picture, placeholder: int, *after: int) -> None:
    prompt.places.append((len(prompt.ids), picture))
    prompt.ids += [placeholder] * (len(picture.pixels) // 4) + list(after)


def without_placeholders(logits: torch.Tensor) -> torch.Tensor:
    """Log-probs of logits where placeholders cannot be drawn."""
    return logits.index_fill(-1, torch.tensor([IMAGE, VIDEO]), -torch.inf).log_softmax(-1)


def check(model: Any, prompt: ImagePrompt, output: Any) -> None:
    """The log-probs of a completion are those of transformers' model for these pixels."""
    exact = without_placeholders(logits_of(model, prompt, output.token_ids)[len(prompt.ids) - 1 : -1])
    found = exact.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
    np.testing.assert_allclose(output.log_probs, found.numpy(), atol=1e-4)


def test_the_trainers_pixels_are_the_workers(served: Any) -> None:
    """Through verl's agent loop: its batch has all that the trainer's forward takes."""
    _, (model, _), config, servers = served
    contents: list[Any] = [
        [{"type": "image", "image": drawn(40, 24, 1)}, {"type": "text", "text": "w5 w6"}],
        [
            {"type": "text", "text": "w7"},
            {"type": "image", "image": drawn(16, 48, 2)},
            {"type": "text", "text": "w8 w9"},
            {"type": "image", "image": drawn(40, 24, 1)},
        ],
        "w12 w13 w14",
    ]
    prompts = np.empty(6, dtype=object)
    prompts[:] = [[{"role": "user", "content": content}] for content in contents for _ in range(2)]
    batch = DataProto(non_tensor_batch={"raw_prompt": prompts})

    async def loop() -> Any:
        return await AgentLoopWorker(config, servers.get_client()).generate_sequences(batch)

    output = asyncio.run(loop())
    given = output.non_tensor_batch["multi_modal_inputs"]
    grids = [inputs.get("image_grid_thw", torch.zeros(0, 3)).tolist() for inputs in given]
    assert [len(grid) for grid in grids] == [1, 1, 2, 2, 0, 0] and grids[2][1] == grids[0][0]
    for i in range(6):
        there = output.batch["attention_mask"][i].bool()
        ids = output.batch["input_ids"][i][there]
        pixels = {name: given[i][name] for name in ("pixel_values", "image_grid_thw") if name in given[i]}
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(
                input_ids=ids[None],
                position_ids=output.batch["position_ids"][i][..., there][-3:, None],
                mm_token_type_ids=(ids == IMAGE).int()[None],
                **pixels,
            ).logits[0]
        said = output.batch["response_mask"][i].bool()
        tokens, count = output.batch["responses"][i][said], int(said.sum())
        assert count > 0 and not set(tokens.tolist()) & {IMAGE, VIDEO}
        exact = without_placeholders(logits[-count - 1 : -1]).gather(-1, tokens[:, None])[:, 0]
        np.testing.assert_allclose(output.batch["rollout_log_probs"][i][said], exact, atol=1e-4)


def test_images_and_videos_of_a_conversation(served: Any) -> None:
    name, (model, _), _, servers = served
    picture, video = drawn(40, 24, 3), np.random.default_rng(4).integers(0, 256, (6, 3, 16, 24), np.uint8)
    values, (frames, height, width) = patches_of(video)
    if name in SINGLE_FRAMES:
        parts = [Picture((1, height, width), part, True) for part in np.split(values, frames)]
    else:
        parts = [Picture((frames, height, width), values, True)]
    prompt = ImagePrompt([5, 6])
    for part in parts:
        append(prompt, part, VIDEO, 7)
    append(prompt, processed(picture, model), IMAGE, 9, 10)
    data = {"image_data": [picture], "video_data": [(torch.from_numpy(video), {"fps": 4.0})]}
    first, second = generate(servers, prompt.ids, 2, **data)
    check(model, prompt, first)
    check(model, prompt, second)
    after = ImagePrompt([*prompt.ids, *first.token_ids, 11, 12], prompt.places)
    check(model, after, generate(servers, after.ids, **data)[0])


def test_an_update_of_the_tower_reaches_the_next_completions(served: Any) -> None:
    _, (model, ranks), config, servers = served
    picture, prompt = drawn(40, 24, 5), ImagePrompt([5, 6])
    append(prompt, processed(picture, model), IMAGE, 7)
    check(model, prompt, generate(servers, prompt.ids, image_data=[picture])[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    changed = {name: torch.tensor(value) for name, value in ranks.change(9)[0].items()}
    assert all(not torch.equal(value, before[name]) for name, value in changed.items() if ".visual." in name)
    manage(servers, ranks, config).update_weights(2)
    model.load_state_dict(changed)
    check(model, prompt, generate(servers, prompt.ids, image_data=[picture])[0])


def test_pictures_that_do_not_fit_the_prompt_are_refused(served: Any) -> None:
    _, _, _, servers = served
    picture = drawn(40, 24, 6)
    for ids, data, problem in (
        ([5, IMAGE, 6], {"image_data": [picture]}, "placeholders left"),
        ([5, *[IMAGE] * 60, 6], {"image_data": [picture]}, "placeholders more"),
        ([5, 6], {"image_data": [picture]}, "placeholders left"),
        ([5, 6], {"audio_data": ["noise"]}, "audio_data"),
    ):
        with pytest.raises(ValueError, match=problem):
            generate(servers, ids, **data)


@pytest.fixture
def source(tmp_path: Path) -> ProcessorSource:
    make_vision_checkpoint("Qwen3-VL", tmp_path / "model")
    return ProcessorSource(str(tmp_path / "model"), verl_vision.NAME)


def test_a_picture_is_processed_once_while_it_is_kept(source: ProcessorSource) -> None:
    pictures = [drawn(40, 24, seed) for seed in range(3)]

    async def prompts() -> list[int]:
        media, counts = MediaProcessor(source, most_bytes=50_000), []  # of two pictures
        for asked in ([0], [0, 0], [1], [0], [2], [1], [2]):
            before = Qwen3VLProcessor.calls
            ids = [*[IMAGE] * 15, 5] * len(asked)
            made = await media.prompt(ids, [pictures[i].copy() for i in asked], [], {})
            assert [(item.offset, item.grid_thw) for item in made.media] == [
                (16 * i, (1, 6, 10)) for i in range(len(asked))
            ]
            counts.append(Qwen3VLProcessor.calls - before)
        return counts

    assert asyncio.run(prompts()) == [1, 0, 1, 0, 1, 1, 0]
