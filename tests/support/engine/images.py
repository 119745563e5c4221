"""Prompts with images for an engine in the test's own thread."""

from hashlib import blake2b

import numpy as np

from rollout.engine.features.images.encoder import ImageEncoder
from rollout.engine.features.images.feature import ImagesFeature
from rollout.engine.messages.prompts import Media, Pixels, Prompt, TokenIds
from rollout.engine.messages.requests import Request, SamplingParams, StopParams
from rollout.engine.messages.to_engine import Submit
from rollout.engine.schedule.step_feature import find_feature
from rollout.models.vision_spec import TowerSpec
from tests.support.engine.harness import Bench
from tests.support.models.images import ImagePrompt, Picture


def engine_prompt(prompt: ImagePrompt, tower: TowerSpec) -> Prompt:
    """The prompt as the service makes it: a frame of a video is an item of its own where the family wants that."""
    ids, items, at = np.array(prompt.ids, np.int32), [], 0
    for place, picture in frames_of(prompt, tower):
        length = tower.tokens(picture.grid)
        if place > at:
            items.append(TokenIds(ids[at:place]))
        axes_3L, advance = tower.positions(picture.grid, picture.seconds)
        items.append(Media(ids[place : place + length], pixels_of(picture), axes_3L, advance))
        at = place + length
    if at < len(ids):
        items.append(TokenIds(ids[at:]))
    return Prompt(tuple(items))


def frames_of(prompt: ImagePrompt, tower: TowerSpec) -> list[tuple[int, Picture]]:
    """The pictures with their places; each frame on its own where the tower wants single frames."""
    found = []
    for place, picture in prompt.places:
        frames, height, width = picture.grid
        if not tower.family.single_frames or frames == 1:
            found.append((place, picture))
            continue
        raise AssertionError("a prompt of such a model has its frames apart")
    return found


def pixels_of(picture: Picture) -> Pixels:
    """The pixels with their digest."""
    content = repr((picture.grid, str(picture.pixels.dtype))).encode() + picture.pixels.tobytes()
    return Pixels(blake2b(content, digest_size=32).digest(), picture.grid, picture.pixels)


def submit(bench: Bench, name: str, prompt: ImagePrompt, max_tokens: int = 12, **fields) -> None:
    """Put a request into the engine's inbox."""
    tower = encoder_of(bench).spec
    sampling = SamplingParams(**fields.pop("sampling", {"temperature": 0.0}))
    stop = StopParams(**fields.pop("stop", {}))
    request = Request(
        (fields.pop("client", "c"), name), engine_prompt(prompt, tower), max_tokens, sampling=sampling, stop=stop,
        **fields,
    )  # fmt: skip
    bench.engine.inbox.put(Submit(request))


def encoded(bench: Bench) -> int:
    """Images encoded so far."""
    return find_feature(bench.engine.roster.features, ImagesFeature).encodings.counts.encoded


def encoder_of(bench: Bench) -> ImageEncoder:
    """The tower with its buffer."""
    return find_feature(bench.engine.executor.step.features, ImageEncoder)
