"""Images over HTTP: `image_url` parts by the model's own processor, and processed pixels."""

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from rollout_gateway.http.http_errors import HttpError
from rollout_gateway.prompts.image_processor import ImageProcessor
from scripts import spatial
from scripts.check.fuzz_gateway import batter
from tests.support.gateway.harness import gateway
from tests.support.gateway.hostile_images import data_url, encoded, image_part, item_of, png_header, traffic
from tests.support.gateway.image_folder import END, EOT, START, TURN, add_processor
from tests.support.models.images import IMAGE, ImagePrompt, Picture, logits_of, make_model, picture, prompt_with
from tests.support.worker.harness import assert_idle, launch
from trainer_bridge import MediaItem, MediaPrompt, RolloutClient
from trainer_bridge.client.launch import WorkerProcess

LIMITS = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, httpx.Client, Any, Path]]:
    folder = tmp_path_factory.mktemp("images")
    reference = make_model("Qwen3-VL", folder / "model")
    add_processor(folder / "model")
    (folder / "pictures").mkdir()
    flags = {"images": True, "max_rows": 4}
    with (
        launch(folder / "model", log=folder / "log", **flags) as worker,
        gateway([worker.endpoint], images_root=str(folder / "pictures")) as client,
    ):
        yield worker, client, reference, folder / "pictures"
        assert_idle(worker)


def processed(data: bytes, folder: Path) -> Picture:
    """The image by transformers' own processor."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder.parent / "model", backend="pil")
    found = processor(images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="np")
    return Picture(tuple(found["image_grid_thw"][0].tolist()), found["pixel_values"].astype(np.float32))


def check(reference: Any, prompt: ImagePrompt, tokens: list[int]) -> None:
    logits = logits_of(reference, prompt, tokens)
    assert logits[len(prompt.ids) - 1 : -1].argmax(-1).tolist() == tokens


def test_a_chat_with_images_is_what_transformers_makes_of_it(served: Any) -> None:
    _, client, reference, folder = served
    first, second = encoded(40, 24), encoded(16, 50, 1, "JPEG")
    (folder / "second.jpg").write_bytes(second)
    parts = [image_part(data_url(first)), {"type": "text", "text": "w5 w6"}]
    parts += [image_part(f"file://{folder}/second.jpg")]
    body = {"messages": [{"role": "user", "content": parts}], "return_token_ids": True, **LIMITS}
    answer = client.post("/v1/chat/completions", json=body).json()
    pictures = processed(first, folder), processed(second, folder)
    prompt = ImagePrompt([TURN, 10, START])
    for image, after in zip(pictures, ([END, 5, 6, START], [END, EOT, TURN, 11]), strict=True):
        prompt.places.append((len(prompt.ids), image))
        prompt.ids += [IMAGE] * (len(image.pixels) // 4) + after
    assert answer["prompt_token_ids"] == prompt.ids
    check(reference, prompt, answer["choices"][0]["token_ids"])
    rendered = client.post("/v1/chat/completions/render", json={"messages": body["messages"]}).json()
    assert rendered["token_ids"] == prompt.ids
    streamed = []
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                streamed += httpx.Response(200, text=line[6:]).json()["choices"][0].get("token_ids", [])
    assert streamed == answer["choices"][0]["token_ids"]


def test_a_later_turn_goes_on_from_the_tokens_of_the_earlier_one(served: Any) -> None:
    _, client, reference, folder = served
    first, second = encoded(24, 24, 2), encoded(32, 16, 3)
    messages: list[Any] = [{"role": "user", "content": [image_part(data_url(first))]}]
    answer = client.post("/v1/chat/completions", json={"messages": messages, "return_token_ids": True, **LIMITS}).json()
    tokens = answer["choices"][0]["token_ids"]
    drawn = {"prompt_token_ids": answer["prompt_token_ids"], "generation_token_ids": tokens}
    messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"], **drawn}]
    messages += [{"role": "user", "content": [image_part(data_url(second)), {"type": "text", "text": "w7"}]}]
    later = client.post("/v1/chat/completions", json={"messages": messages, "return_token_ids": True, **LIMITS})
    prompt = ImagePrompt([*drawn["prompt_token_ids"], *tokens], [(3, processed(first, folder))])
    prompt.ids += [EOT, TURN, 10, START]
    prompt.places.append((len(prompt.ids), processed(second, folder)))
    prompt.ids += [IMAGE] * prompt.length(1) + [END, 7, EOT, TURN, 11]
    assert later.json()["prompt_token_ids"] == prompt.ids
    check(reference, prompt, later.json()["choices"][0]["token_ids"])


def test_a_session_keeps_the_tokens_of_images_of_other_dialects(served: Any) -> None:
    _, client, reference, folder = served
    first, second = encoded(24, 24, 2), encoded(32, 16, 3)

    def block(data: bytes) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
        return {"type": "image", "source": source}

    headers = {"X-Session-ID": "images"}
    body = {"model": client.get("/v1/models").json()["data"][0]["id"], **LIMITS}
    messages: list[Any] = [{"role": "user", "content": [block(first)]}]
    answer = client.post("/v1/messages", json=body | {"messages": messages}, headers=headers).json()
    messages += [{"role": "assistant", "content": answer["content"]}]
    messages += [{"role": "user", "content": [block(second), {"type": "text", "text": "w7"}]}]
    assert client.post("/v1/messages", json=body | {"messages": messages}, headers=headers).status_code == 200
    found = client.get("/v1/trajectories/images").json()
    assert [turn["parent"] for turn in found["turns"]] == [None, 0]
    (branch,), (earlier, later) = found["branches"], found["turns"]
    prompt = ImagePrompt(branch["token_ids"][: earlier["end"]], [(3, processed(first, folder))])
    prompt.ids += [EOT, TURN, 10, START]
    prompt.places.append((len(prompt.ids), processed(second, folder)))
    prompt.ids += [IMAGE] * prompt.length(1) + [END, 7, EOT, TURN, 11]
    assert branch["token_ids"][: later["start"]] == prompt.ids
    check(reference, prompt, branch["token_ids"][later["start"] :])
    item = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(first)}]}
    limits = {"max_output_tokens": 6, "temperature": 0, "ignore_eos": True, "store": False}
    response = client.post("/v1/responses", json={"input": [item], **limits}).json()
    assert response["usage"]["input_tokens"] == earlier["start"]
    assert client.post("/finish_session?session_id=images").json()["finished"]


def test_processed_pixels_need_no_second_processor(served: Any) -> None:
    _, client, reference, _ = served
    prompt = prompt_with(4, picture(4, 6, 5), 3)
    item = item_of(prompt)
    body = {"token_ids": prompt.ids, "media": [item], "sampling_params": LIMITS}
    answer = client.post("/inference/v1/generate", json=body).json()
    check(reference, prompt, answer["choices"][0]["token_ids"])
    for change, param in (
        ({"pixel_values": "?"}, "media.0.pixel_values"),
        ({"pixel_values": ""}, "media.0.pixel_values"),
        ({"grid_thw": [1, 4]}, "media.0.grid_thw"),
        ({"grid_thw": [1, 4, 5]}, "media.0.pixel_values"),
        ({"dtype": "int8"}, "media.0.dtype"),
        ({"length": 5}, "media.0.length"),
        ({"offset": 3}, "media.0.offset"),
    ):
        error = client.post("/inference/v1/generate", json=body | {"media": [item | change]})
        assert (error.status_code, error.json()["param"]) == (400, param), error.text


def test_a_point_in_an_image_is_of_the_words_for_places(served: Any) -> None:
    """The constraint of the skill `point`, with an image: of the allowed words the likeliest are drawn."""
    worker, _, reference, _ = served
    prompt, places = prompt_with(4, picture(4, 6, 5), 3), [12, 30, 31, 77]
    grammar = spatial.point(spatial.vocabulary(f"w{token}" for token in places))
    media = [MediaItem(place, prompt.length(0), image.grid, image.pixels) for place, image in prompt.places]
    with RolloutClient(worker.endpoint) as client:
        result = client.generate(
            MediaPrompt(np.array(prompt.ids, np.int32), tuple(media)),
            max_tokens=5,
            temperature=0.0,
            constraint={"grammar": grammar},
        )
    tokens = result.completions[0].token_ids.tolist()
    assert result.completions[0].finish_reason == "stop" and len(tokens) == 3
    logits = logits_of(reference, prompt, tokens)[len(prompt.ids) - 1 : -1]
    assert [places[int(each)] for each in logits[:2, places].argmax(-1)] == tokens[:2]


def bytes_of(picture: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def noise(mode: str = "RGB") -> Image.Image:
    """A picture that looks different from every side."""
    return Image.open(io.BytesIO(encoded(40, 24, 3))).convert(mode)


def exif(orientation: int) -> Image.Exif:
    """EXIF data with this orientation."""
    data = Image.Exif()
    data[ExifTags.Base.Orientation] = orientation
    return data


def half_seen(mode: str, hidden: int) -> Image.Image:
    """A picture whose left half is transparent; there its colours are `hidden`."""
    picture = noise("RGB").convert("L").convert("RGBA")
    picture.paste((hidden, hidden, hidden, 0), (0, 0, 20, 24))
    return picture.convert(mode)


#: Pairs of files that look the same on a white page: what is sent, and a plain picture of it.
SAME_LOOKS: dict[str, tuple[bytes, bytes]] = {
    **{
        f"{form} turned by {turn}": (
            (turned := bytes_of(noise(), form, exif=exif(turn), **options)),
            bytes_of(ImageOps.exif_transpose(Image.open(io.BytesIO(turned)))),
        )
        for form, turn, options in (
            *(("JPEG", turn, {"quality": 95}) for turn in range(1, 9)),
            ("PNG", 6, {}),
            ("WEBP", 8, {"lossless": True}),
        )
    },
    **{
        f"{form} {mode} with an alpha of its own": (
            bytes_of(half_seen(mode, 7), form, **options),
            bytes_of(half_seen(mode, 255).convert("RGBA").convert("RGB")),
        )
        for form, mode, options in (
            ("PNG", "RGBA", {}),
            ("PNG", "LA", {}),
            ("WEBP", "RGBA", {"lossless": True, "exact": True}),
        )
    },
    "a palette with a transparent colour": (
        bytes_of(noise("L").point(lambda value: min(value, 99)).convert("P"), transparency=99),
        bytes_of(noise("L").point(lambda value: 255 if value >= 99 else value)),
    ),
    "grey with a transparent value": (
        bytes_of(noise("L").point(lambda value: min(value, 99)), transparency=99),
        bytes_of(noise("L").point(lambda value: 255 if value >= 99 else value)),
    ),
    "a GIF with a transparent colour": (
        bytes_of(noise("L").point(lambda value: min(value, 99)).convert("P"), "GIF", transparency=99),
        bytes_of(noise("L").point(lambda value: 255 if value >= 99 else value)),
    ),
    "16 bits of grey": (bytes_of(Image.fromarray(np.asarray(noise("L"), np.uint16) * 257)), bytes_of(noise("L"))),
    "no EXIF data where a tag says so": (
        bytes_of(noise(), "WEBP", exif=b"no data", lossless=True),
        bytes_of(noise(), "WEBP", lossless=True),
    ),
}


@pytest.mark.parametrize("case", SAME_LOOKS)
def test_a_picture_is_what_a_viewer_shows(case: str, served: Any) -> None:
    _, client, _, _ = served
    prompts, answers = [], []
    for data in SAME_LOOKS[case]:
        body = {"messages": [{"role": "user", "content": [image_part(data_url(data))]}], **LIMITS}
        answer = client.post("/v1/chat/completions", json=body | {"logprobs": True, "return_token_ids": True}).json()
        prompts.append(answer["prompt_token_ids"])
        answers.append([entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]])
    assert prompts[0] == prompts[1]
    assert answers[0] == pytest.approx(answers[1], abs=1e-4)


@pytest.mark.parametrize("size", [(1, 1), (1, 199), (199, 1), (3, 7), (27, 332), (500, 19)])
def test_pictures_of_odd_sizes_are_what_transformers_makes_of_them(served: Any, size: tuple[int, int]) -> None:
    _, client, reference, folder = served
    file = encoded(*size, 4)
    body = {"messages": [{"role": "user", "content": [image_part(data_url(file))]}], "return_token_ids": True, **LIMITS}
    answer = client.post("/v1/chat/completions", json=body | {"prompt_logprobs": 0}).json()
    made = processed(file, folder)
    prompt = ImagePrompt([TURN, 10, START], [(3, made)])
    prompt.ids += [IMAGE] * (len(made.pixels) // 4) + [END, EOT, TURN, 11]
    assert answer["prompt_token_ids"] == prompt.ids and answer["usage"]["prompt_tokens"] == len(prompt.ids)
    check(reference, prompt, answer["choices"][0]["token_ids"])
    first, *scores = answer["prompt_logprobs"]
    wanted = logits_of(reference, prompt, []).log_softmax(-1)
    assert first is None and len(scores) == len(prompt.ids) - 1
    for place, (entry, token) in enumerate(zip(scores, prompt.ids[1:], strict=True)):
        assert entry[str(token)]["logprob"] == pytest.approx(float(wanted[place, token]), abs=1e-3)


def test_many_small_pictures_in_one_prompt(served: Any) -> None:
    _, client, reference, folder = served
    files = [encoded(1 + 5 * place, 30 - place, place) for place in range(12)]
    parts = [image_part(data_url(file)) for file in files]
    body = {"messages": [{"role": "user", "content": parts}], "return_token_ids": True, **LIMITS}
    answer = client.post("/v1/chat/completions", json=body).json()
    prompt = ImagePrompt([TURN, 10])
    for file in files:
        prompt.ids.append(START)
        prompt.places.append((len(prompt.ids), processed(file, folder)))
        prompt.ids += [IMAGE] * prompt.length(len(prompt.places) - 1) + [END]
    prompt.ids += [EOT, TURN, 11]
    assert answer["prompt_token_ids"] == prompt.ids
    check(reference, prompt, answer["choices"][0]["token_ids"])


BAD_URLS = {
    "http": ("http://127.0.0.1:1/x.png", "does not fetch"),
    "another scheme": ("gopher://x", "does not fetch"),
    "no base64": ("data:image/png,xyz", "base64"),
    "no ASCII": ("data:image/png;base64,AAA\u03c9", "base64"),
    "no URL": ("file://[", "cannot be read"),
    "wrong base64": ("data:image/png;base64,@@@", "base64"),
    "no picture": (data_url(b"x" * 100), "is not one of PNG"),
    "cut off": (data_url(encoded(40, 40)[:200]), "decoded"),
    "a file elsewhere": ("file:///etc/passwd", "no such file"),
    "a way out": ("file://{root}/../model/config.json", "no such file"),
    "no file": ("file://{root}/none.png", "no such file"),
    "a null": ("file://{root}/%00.png", ""),
    "another host": ("file://example.com/x.png", "no such file"),
    "too long a side": (data_url(encoded(2000, 4)), "refuses"),
    "too long a side of one pixel": (data_url(encoded(1, 201)), "refuses"),
    "too many pixels": (data_url(png_header(9000, 9000)), "megapixels"),
    "far too many": (data_url(png_header(60_000, 60_000)), "decoded"),
    "a vector picture": ("data:image/svg+xml;base64,PHN2Zy8+", "is not one of PNG"),
    "a link out": ("file://{root}/link.png", "no such file"),
    "a folder": ("file://{root}", "no such file"),
}


@pytest.mark.parametrize("case", BAD_URLS)
def test_a_bad_image_is_named(case: str, served: Any) -> None:
    _, client, _, folder = served
    url, says = BAD_URLS[case]
    if case == "a link out":
        (folder / "link.png").symlink_to(folder.parent / "model" / "config.json")
    content = [{"type": "text", "text": "w5"}, image_part(url.replace("{root}", str(folder)))]
    body = {"messages": [{"role": "user", "content": content}], **LIMITS}
    for answer in (client.post("/v1/chat/completions", json=body | {"stream": stream}) for stream in (False, True)):
        assert answer.status_code == 400 and answer.json()["param"] == "messages.0.content.1.image_url.url", answer.text
        assert says in answer.json()["message"]


def test_text_must_not_have_placeholders(served: Any) -> None:
    _, client, _, _ = served
    parts = [image_part(data_url(encoded(24, 24))), {"type": "text", "text": "<image>"}]
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}], **LIMITS})
    assert answer.status_code == 400 and "placeholder" in answer.json()["message"]
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "<image>"}], **LIMITS})
    assert answer.status_code == 400 and "placeholder" in answer.json()["message"]


def test_a_gateway_of_a_model_of_text_refuses_images(client: httpx.Client) -> None:
    parts = [image_part(data_url(encoded(24, 24)))]
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 400 and answer.json()["param"] == "messages.0.content.0.image_url.url"


def test_a_request_has_a_limit_of_images(served: Any) -> None:
    _, client, _, _ = served
    parts = [image_part(data_url(encoded(24, 24)))] * 65
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}], **LIMITS})
    assert (answer.status_code, answer.json()["param"]) == (400, "messages"), answer.text


def test_a_request_has_a_limit_of_patches(served: Any) -> None:
    _, _, _, folder = served
    images, url = ImageProcessor.load(folder.parent / "model", None, most_patches=2 * 36), data_url(encoded(24, 24))
    assert images is not None
    try:
        assert len(asyncio.run(images.process([(url, "first"), (url, "second")]))) == 2
        with pytest.raises(HttpError) as refused:
            asyncio.run(images.process([(url, "first"), (url, "second"), (url, "third")]))
    finally:
        images.close()
    assert (refused.value.status, refused.value.param) == (400, "third")


def hostile(served: Any, seed: int, count: int) -> None:
    """Mutated requests, beside a bystander whose image must be answered as before."""
    _, client, _, folder = served
    body = {"messages": [{"role": "user", "content": [image_part(data_url(encoded(32, 20, 9)))]}], **LIMITS}
    known = client.post("/v1/chat/completions", json=body).json()["choices"]

    def bystand(client: httpx.Client) -> None:
        assert client.post("/v1/chat/completions", json=body).json()["choices"] == known

    statuses = batter(client, seed, count, traffic(folder, prompt_with(4, picture(4, 6, 5), 3)), bystand)
    assert statuses[200] > count / 20 and statuses[400] > count / 20


def test_mutated_requests_with_images(served: Any) -> None:
    hostile(served, 1, 120)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_mutated_requests_with_images(served: Any, seed: int) -> None:
    hostile(served, seed, 5_000)
