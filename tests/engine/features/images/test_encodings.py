"""The books of the embedding buffer, without a tower."""

import numpy as np

from rollout.engine.features.images.encodings import BLOCK, Encodings
from rollout.engine.messages.requests import Request
from rollout.engine.sequence.sequence import Group, Sequence
from tests.support.engine.images import engine_prompt, pixels_of
from tests.support.models.images import picture, prompt_with
from tests.support.service.media import TOWER

TEXT = 2  # tokens before and after each image


def test_what_a_step_needs_is_there_whatever_the_order_of_images() -> None:
    """An image that a step needs lies whole in its cells, and no other image of the step gives it away."""
    chance = np.random.default_rng(5)
    images = [picture(2 * h, 2 * w, seed) for seed, (h, w) in enumerate(chance.integers(3, 13, (10, 2)).tolist())]
    books = Encodings(3 * BLOCK, 5_000, ("visual.",))
    buffer: dict[int, bytes] = {}  # what was written last to each cell
    refused = 0
    for step in range(600):
        books.plan_begins()
        needed: list[tuple[bytes, np.ndarray]] = []
        for which in chance.integers(0, len(images), 4):
            prompt = engine_prompt(prompt_with(TEXT, images[which], TEXT), TOWER)
            seq = Sequence(Group(Request(("c", "r"), prompt, 4), 0.0, "c"), 0, 0)
            length = books.fit(seq, 0, seq.prompt_len)
            assert length in (TEXT, seq.prompt_len)
            refused += length == TEXT
            needed += [(pixels_of(images[which]).digest, part.cells) for part in books.tokens_of(seq, 0, length)]
        assert needed, "the first image of a step has room"
        for encode in books.take_encodes():
            assert not any(set(encode.cells) & set(cells) for digest, cells in needed if digest != encode.pixels.digest)
            buffer |= dict.fromkeys(encode.cells.tolist(), encode.pixels.digest)
        for digest, cells in needed:
            assert {buffer[cell] for cell in cells.tolist()} == {digest}
        books.check()
        if step % 50 == 49:
            books.weights_changed(["model.layers.0.weight"])
            assert books.used > 0
            books.weights_changed(["lm_head.weight", "visual.merger.weight"])
            assert books.used == 0
            buffer.clear()
    assert min(books.counts.reused, books.counts.encoded, refused) > 20
