"""Requests with images for the fuzzer of the gateway: valid ones, and what takes the place of their parts."""

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scripts.check.fuzz_gateway import ODD, Traffic
from tests.support.models.images import ImagePrompt


def encoded(width: int, height: int, seed: int = 0, form: str = "PNG", mode: str = "RGB") -> bytes:
    """A picture of noise as a file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, form)
    return file.getvalue()


def data_url(data: bytes) -> str:
    """A data URL of these bytes."""
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_part(url: Any) -> dict[str, Any]:
    """The part of a message that has an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def png_header(width: int, height: int) -> bytes:
    """A picture that says that it has this size, and has no pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


def item_of(prompt: ImagePrompt) -> dict[str, Any]:
    """The processed pixels of a prompt's image, as `/inference/v1/generate` takes them."""
    place, image = prompt.places[0]
    return {
        "offset": place,
        "length": prompt.length(0),
        "grid_thw": list(image.grid),
        "dtype": "float32",
        "pixel_values": base64.b64encode(image.pixels.tobytes()).decode(),
    }


def traffic(root: Path, prompt: ImagePrompt) -> Traffic:
    """Chats with pictures in data URLs and in files below `root`, processed pixels, and what may be wrong with them."""
    if not (root / "fuzz.jpg").exists():
        _write_files(root)
    limits = {"max_tokens": 2, "temperature": 0}
    picture, file = image_part(data_url(encoded(24, 24))), image_part(f"file://{root}/fuzz.jpg")
    text = {"type": "text", "text": "w5"}
    chats: list[Any] = [[picture, text], [text, file, text, picture], [file]]
    valid: list[tuple[str, dict[str, Any]]] = [
        (path, {"messages": [{"role": "user", "content": parts}], **(limits if path.endswith("ions") else {})})
        for path in ("/v1/chat/completions", "/v1/chat/completions/render", "/tokenize")
        for parts in chats
    ]
    pixels = {"token_ids": prompt.ids, "media": [item_of(prompt)], "sampling_params": limits}
    valid += [("/inference/v1/generate", pixels)] * 4
    forms = [("JPEG", "CMYK"), ("PNG", "P"), ("PNG", "LA"), ("GIF", "P"), ("WEBP", "RGBA"), ("BMP", "1")]
    urls = [data_url(encoded(12, 40, 5, form, mode)) for form, mode in forms]
    urls += [data_url(png_header(*size)) for size in ((0, 0), (8, 8), (60_000, 60_000), (2**31 - 1, 1))]
    urls += [data_url(data) for data in (b"", b"GIF89a", encoded(16, 16)[:90], encoded(1, 1), encoded(900, 4))]
    urls += [
        "data:,",
        "data:image/png;base64",
        "data:image/png;base64,=",
        "data:image/svg+xml;base64,PHN2Zy8+",
        "DATA:;base64,AA==",
    ]
    names = (
        "empty.png",
        "folder.png",
        "out.png",
        "circle.png",
        "none.png",
        "../model/config.json",
        "%2e%2e/model/config.json",
        "a\0b",
    )
    urls += [f"file://{root}/{name}" for name in names] + [
        "file:///dev/zero",
        "file://h/x",
        "file://[",
        "file:",
        "http://127.0.0.1/x.png",
    ]
    parts = [
        *map(image_part, (*urls, None, 1, {})),
        {"type": "image_url"},
        {"type": "image_url", "image_url": urls[0]},
        {"type": "image"},
    ]
    grids = [[0, 2, 2], [1, 3, 4], [1, 1 << 20, 1 << 20], [1, -2, -2], [2, 2, 6], [1, 2], [1.0, 4, 6], "146"]
    values = ["", "AAAA", "?", base64.b64encode(np.full(24 * 96, np.nan, np.float32).tobytes()).decode(), "A" * 100_000]
    return Traffic(valid, (*ODD, *urls, *parts, *grids, *values, [picture] * 65, "<image>", "float16", "bfloat16"))


def _write_files(root: Path) -> None:
    (root / "fuzz.jpg").write_bytes(encoded(20, 28, 3, "JPEG"))
    (root / "empty.png").write_bytes(b"")
    (root / "folder.png").mkdir()
    (root / "out.png").symlink_to(root.parent / "model" / "config.json")
    (root / "circle.png").symlink_to(root / "circle.png")
