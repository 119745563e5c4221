"""The example that asks for places in a picture, with a tiny random model and the processor of its folder."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor, Qwen3VLConfig

from scripts.find_in_picture import main, places_of
from tests.support.gateway.image_folder import add_processor_of_characters
from tests.support.integrations.image_processor import WordsAndImages
from tests.support.models.images import make_model
from tests.support.worker.harness import assert_idle, launch

SIZE = 40, 24


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("places")
    make_model("Qwen3-VL", folder / "model")
    add_processor_of_characters(folder / "model")
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (SIZE[1], SIZE[0], 3), np.uint8)).save(folder / "a.png")
    flags = {"images": True, "max_rows": 4}
    AutoProcessor.register(Qwen3VLConfig, WordsAndImages, exist_ok=True)
    with launch(folder / "model", log=folder / "log", **flags) as worker:
        yield worker.endpoint, folder
        assert_idle(worker)


@pytest.mark.nightly
@pytest.mark.parametrize(("skill", "numbers", "least"), [("point", 2, 1), ("detect", 3, 0), ("segment", 2, 3)])
def test_a_random_model_answers_with_places_in_the_picture(
    skill: str, numbers: int, least: int, served: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint, folder = served
    given = [endpoint, str(folder / "model"), str(folder / "a.png"), "--skill", skill, "--most", "4", "--answers", "3"]
    assert main([*given, "--seed", "7", "--temperature", "1", "--out", str(folder / f"{skill}.png")]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({json.dumps(answer["places"]) for answer in answers}) > 1, "random"
    for answer in answers:
        assert least <= len(answer["places"]) <= 4 and answer["logprob"] <= 0
        for place in answer["places"]:
            assert len(place) == numbers and 0 <= place[0] < SIZE[0] and 0 <= place[1] < SIZE[1]
    with Image.open(folder / f"{skill}.png") as drawn, Image.open(folder / "a.png") as before:
        assert drawn.size == SIZE and drawn.tobytes() != before.tobytes()


@pytest.mark.nightly
def test_an_answer_that_is_cut_off_is_not_drawn(served: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    endpoint, folder = served
    given = [endpoint, str(folder / "model"), str(folder / "a.png"), "--skill", "segment", "--max-tokens", "4"]
    assert main(given) == 1
    assert json.loads(capsys.readouterr().out) == {"answer": 0, "finish_reason": "length"}


def test_places_are_thousandths_of_the_picture() -> None:
    assert places_of("500 250 100\n0 999 1", (2000, 400)) == [(1000.0, 100.0, 200.0), (0.0, 399.6, 2.0)]
    assert places_of("", (10, 10)) == []
