"""Images and videos on the wire: what a processor of a model returned, by piece, and the name of each piece.

    {"offset": 5, "length": 10, "grid_thw": [1, 4, 10], "hash": "9f...", "pixel_values": blob, "seconds_per_frame": 0.5}

`length` tokens of the prompt from `offset` on are its placeholders. A blob of `<u2` has the bits of bfloat16. Without
`pixel_values` a piece is named: the worker has it from an earlier message. `hash` is `media_hash` of the piece.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

#: The types of pixel values: float32, float16, and the bits of bfloat16.
PIXEL_TYPES: dict[np.dtype[Any], str] = {
    np.dtype("<f4"): "float32",
    np.dtype("<f2"): "float16",
    np.dtype("<u2"): "bfloat16",
}
HASH_CHARS = 64


def media_hash(pixel_values: np.ndarray, grid_thw: Sequence[int]) -> str:
    """The name of a piece: 256 bits of BLAKE2b, hexadecimal, of `TYPE t h w` in ASCII, a newline, and the values.

    `pixel_values` are of one of `PIXEL_TYPES`, little-endian and in C order.
    """
    head = f"{PIXEL_TYPES[pixel_values.dtype]} {' '.join(str(int(size)) for size in grid_thw)}\n"
    digest = blake2b(head.encode("ascii"), digest_size=HASH_CHARS // 2)
    digest.update(memoryview(np.ascontiguousarray(pixel_values)).cast("B"))
    return digest.hexdigest()
