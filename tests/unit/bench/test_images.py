"""The benchmark of prompts with images, at a tiny size on a CPU."""

import json
from pathlib import Path

import pytest

from scripts.bench import encode
from scripts.bench.images import main, write_checkpoint, write_processor


@pytest.mark.nightly
def test_it_measures_images_and_text(tmp_path: Path) -> None:
    sizes = {"prompts": 3, "n": 2, "rows": 4, "side": 96, "text": 16, "new": 8}
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    assert main(["--shape", "tiny", "--device", "cpu", "--out", str(tmp_path / "out.json"), *flags]) == 0
    image, text = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (image["kind"], image["images_encoded"], image["completions"]) == ("image", 3, 6)
    assert (text["kind"], text["images_encoded"]) == ("text", 0)
    assert 0 < image["first_token_s"]["least"] <= image["seconds"]


def test_the_checkpoint_of_the_peer_has_a_tokenizer_and_an_image_processor(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    folder = write_processor(write_checkpoint("qwen3-vl-8b", tmp_path), 1 << 20)
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == config.image_token_id
    assert (
        AutoImageProcessor.from_pretrained(folder, backend="pil").merge_size == config.vision_config.spatial_merge_size
    )


def test_the_tower_alone_is_measured_beside_its_floor(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--shape", "tiny", "--device", "cpu", "--side", "96", "--images", "1", "2", "--tflops", "1e-6"]
    assert encode.main(["--out", str(out), *flags]) == 0
    one, two = json.loads(out.read_text())["rows"]
    assert one["device_ms"] > 0 and two["floor_ms"] == pytest.approx(2 * one["floor_ms"], abs=0.02)
