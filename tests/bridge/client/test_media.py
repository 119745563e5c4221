"""From what a processor returns to a prompt with images."""

from typing import Any

import numpy as np
import pytest
import torch

from trainer_bridge import MediaItem, MediaPrompt, processor_prompt, processor_prompts
from trainer_bridge.client.generate_request import plan_request
from trainer_bridge.wire.media_hash import media_hash

IMAGE, VIDEO = 88, 89


def inputs_of(rows: list[list[int]], grids: list[list[int]], video: bool = False, **more: Any) -> dict[str, Any]:
    """What a processor returns for prompts of these ids, padded on the left."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    patches = sum(t * h * w for t, h, w in grids)
    pixels = torch.arange(patches * 6, dtype=torch.float32).reshape(patches, 6)
    kind = "_videos" if video else ""
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        f"pixel_values{kind}": pixels,
        f"{'video' if video else 'image'}_grid_thw": torch.tensor(grids),
        **more,
    }


def places(prompt: MediaPrompt) -> list[tuple[int, int, tuple[int, int, int]]]:
    return [(item.offset, item.length, item.grid_thw) for item in prompt.media]


def test_a_batch_of_prompts_with_several_images() -> None:
    rows = [[3, *[IMAGE] * 2, 4, *[IMAGE] * 3, *[IMAGE] * 1], [5, 6], [*[IMAGE] * 2, 7]]
    grids = [[1, 2, 4], [1, 6, 2], [1, 2, 2], [1, 4, 2]]
    prompts = processor_prompts(inputs_of(rows, grids))
    assert [prompt.token_ids.tolist() for prompt in prompts] == rows
    assert places(prompts[0]) == [(1, 2, (1, 2, 4)), (4, 3, (1, 6, 2)), (7, 1, (1, 2, 2))]
    assert places(prompts[1]) == [] and places(prompts[2]) == [(0, 2, (1, 4, 2))]
    starts = [item.pixel_values[0, 0] / 6 for prompt in prompts for item in prompt.media]
    assert starts == [0, 8, 20, 24]


def test_a_video_in_one_piece_keeps_its_time_and_one_with_stamps_comes_apart() -> None:
    whole = processor_prompt(
        inputs_of([[1, *[VIDEO] * 6, 2]], [[3, 2, 4]], True, second_per_grid_ts=torch.tensor([0.5]))
    )
    assert places(whole) == [(1, 6, (3, 2, 4))] and whole.media[0].seconds_per_frame == 0.5
    rows = [[1, *[VIDEO] * 2, 2, *[VIDEO] * 2, 3, *[VIDEO] * 2, 4]]
    apart = processor_prompt(inputs_of(rows, [[3, 2, 4]], True))
    assert places(apart) == [(1, 2, (1, 2, 4)), (4, 2, (1, 2, 4)), (7, 2, (1, 2, 4))]
    assert np.array_equal(np.concatenate([item.pixel_values for item in apart.media]), whole.media[0].pixel_values)


def test_pixels_keep_their_bits() -> None:
    inputs = inputs_of([[1, *[IMAGE] * 2]], [[1, 2, 4]])
    for dtype, expected in ((torch.bfloat16, np.uint16), (torch.float16, np.float16), (torch.float32, np.float32)):
        pixels = inputs["pixel_values"].to(dtype)
        (item,) = processor_prompt(inputs | {"pixel_values": pixels}).media
        assert item.pixel_values.dtype == expected
        assert item.pixel_values.tobytes() == pixels.view(torch.uint8).numpy().tobytes()
        assert item.hash == media_hash(item.pixel_values, (1, 2, 4))


@pytest.mark.parametrize(
    ("rows", "grids", "says"),
    [
        ([[1, IMAGE, IMAGE]], [[1, 2, 4], [1, 2, 4]], "do not fit"),
        ([[1, IMAGE, 2, IMAGE]], [[1, 2, 4]], "other tokens between"),
        ([[1, IMAGE, IMAGE, IMAGE]], [[1, 2, 4]], "do not fit"),
        ([[1, 2]], [[1, 2, 4]], "do not fit"),
    ],
)
def test_what_does_not_fit_together_is_refused(rows: Any, grids: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        processor_prompts(inputs_of(rows, grids))


def test_placeholders_need_pixels_and_types() -> None:
    inputs = inputs_of([[1, IMAGE, IMAGE]], [[1, 2, 4]])
    with pytest.raises(ValueError, match="returned no pixel_values"):
        processor_prompt({**inputs, "pixel_values": None})
    without = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
    with pytest.raises(ValueError, match="image_token_id"):
        processor_prompt(without)
    assert places(processor_prompt(without, IMAGE)) == [(1, 2, (1, 2, 4))]


def test_a_prompt_without_images_is_one_of_token_ids() -> None:
    prompt = processor_prompt({"input_ids": [[3, 4]], "attention_mask": [[1, 1]]})
    assert plan_request(prompt, {}).fields["prompt"].tolist() == [3, 4]
    assert "media" not in plan_request(prompt, {}).fields


def test_the_next_turn_moves_its_images() -> None:
    pixels = np.zeros((8, 6), np.float32)
    first = MediaPrompt(np.array([1, IMAGE, IMAGE], np.int32), (MediaItem(1, 2, (1, 2, 4), pixels),))
    second = first.followed_by([5, 6], MediaPrompt(np.array([7, IMAGE, IMAGE], np.int32), first.media))
    assert second.token_ids.tolist() == [1, IMAGE, IMAGE, 5, 6, 7, IMAGE, IMAGE]
    assert places(second) == [(1, 2, (1, 2, 4)), (6, 2, (1, 2, 4))]
    assert second.media[0].hash == second.media[1].hash


@pytest.mark.parametrize(
    ("pixels", "grid", "says"),
    [
        (np.zeros((8, 6)), (1, 2, 4), "float64"),
        (np.zeros(48, np.float32), (1, 2, 4), "a row for each patch"),
        (np.zeros((8, 6), np.float32), (1, 2, 2), "4 patches, not 8"),
    ],
)
def test_a_wrong_item_is_refused(pixels: np.ndarray, grid: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MediaItem(0, 2, grid, pixels)
