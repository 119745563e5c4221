"""Images of chat messages: from OpenAI's `image_url` to pixels by the model's own image processor.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}      or file:///... below --images-root

The chat template writes one placeholder for an image; the prompt gets as many as its grid takes. Nothing is fetched
from a network. Pictures are decoded and processed on a thread of their own; the event loop goes on.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from rollout_gateway.http.http_errors import bad_request
from trainer_bridge.client.media import MediaItem
from trainer_bridge.wire.media_hash import media_hash

#: Formats that Pillow may open. Its other formats have had more faults, or are no pictures.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MOST_IMAGES = 64
_MOST_PIXELS = 64 << 20  # pixels of a picture before it is resized
_MOST_FILE_BYTES = 64 << 20
MOST_PATCHES = 262_144  # patches of all images of a request: a small file may hold a large picture

#: EXIF orientation -> Pillow's operation on the picture.
_TRANSPOSES = {
    **{2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM"},
    **{5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"},
}


@dataclass(frozen=True, slots=True)
class Image:
    """A processed image."""

    grid_thw: tuple[int, int, int]
    pixel_values: np.ndarray  # float32 [patches, values]
    hash: str


class ImageProcessor:
    """The image processor of a model.

    `token_id`: the placeholder of an image. `root`: the folder below which files are read. `most_patches`: the limit of
    the patches of all images of a request.
    """

    def __init__(self, processor: Any, token_id: int, root: Path | None, most_patches: int = MOST_PATCHES) -> None:
        self._processor, self.token_id, self._root = processor, token_id, root
        self._most_patches = most_patches
        self._merged = int(processor.merge_size) ** 2
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")

    @classmethod
    def load(cls, folder: Path, root: str | None, most_patches: int = MOST_PATCHES) -> ImageProcessor | None:
        """The processor of a model's folder; None if the model has no images. Raises ValueError for a broken one."""
        names = ("preprocessor_config.json", "config.json")
        if not all((folder / name).is_file() for name in names):
            return None
        token_id = json.loads((folder / "config.json").read_text()).get("image_token_id")
        if type(token_id) is not int:
            return None
        try:
            processor = _pillow_processor(folder)
        # transformers raises errors of many types for broken files.
        except Exception as error:
            reason = f"{type(error).__name__}: {error!s:.300}"
            raise ValueError(f"cannot read the image processor in {folder}: {reason}") from error
        if not hasattr(processor, "merge_size"):
            return None
        return cls(processor, token_id, None if root is None else Path(root).expanduser().resolve(), most_patches)

    async def process(self, urls: Sequence[tuple[str, str]]) -> list[Image]:
        """The images of these URLs, each with the name of its field. Raises `HttpError`."""
        if len(urls) > _MOST_IMAGES:
            raise bad_request(f"the messages have {len(urls)} images; send at most {_MOST_IMAGES}", "messages")
        loop, images, patches = asyncio.get_running_loop(), [], 0
        for url, field in urls:
            images.append(await loop.run_in_executor(self._thread, self._process, url, field))
            patches += math.prod(images[-1].grid_thw)
            if patches > self._most_patches:
                raise bad_request(
                    f"the images up to this one have {patches} patches; send at most {self._most_patches}", field
                )
        return images

    def expand(self, token_ids: list[int], images: Sequence[Image]) -> tuple[list[int], tuple[MediaItem, ...]]:
        """A prompt with all placeholders of its images, and where they are. Raises `HttpError`.

        `token_ids` have one placeholder for an image, or all of them: tokens of an earlier turn are expanded already.
        """
        expanded: list[int] = []
        media, at = [], 0
        for image in images:
            try:
                found = token_ids.index(self.token_id, at)
            except ValueError:
                raise self._unequal(len(images), "fewer") from None
            expanded += token_ids[at:found]
            length = math.prod(image.grid_thw) // self._merged
            media.append(MediaItem(len(expanded), length, image.grid_thw, image.pixel_values, hash=image.hash))
            expanded += [self.token_id] * length
            whole = token_ids[found : found + length] == [self.token_id] * length
            at = found + (length if whole else 1)
        if self.token_id in token_ids[at:]:
            raise self._unequal(len(images), "more")
        return expanded + token_ids[at:], tuple(media)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _unequal(self, count: int, how: str) -> Exception:
        return bad_request(
            f"the chat template wrote {how} placeholders than the {count} images of the messages; text must not have "
            "the placeholder token",
            "messages",
        )

    def _process(self, url: str, field: str) -> Image:
        from PIL import Image as Pillow
        from PIL import UnidentifiedImageError

        data = self._read(url, field)
        try:
            with Pillow.open(io.BytesIO(data), formats=_FORMATS) as picture:
                if math.prod(picture.size) > _MOST_PIXELS:
                    raise bad_request(f"the image has more than {_MOST_PIXELS >> 20} megapixels", field)
                pixels = _as_shown(picture)
        except UnidentifiedImageError:
            raise bad_request(f"the format of the image is not one of {', '.join(_FORMATS)}", field) from None
        except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
            raise bad_request(f"the image cannot be decoded: {error!s:.200}", field) from None
        try:
            found = self._processor(images=[pixels], return_tensors="np")
        except ValueError as error:  # such as one side 200 times the other
            raise bad_request(f"the model's processor refuses the image: {error!s:.200}", field) from None
        frames, height, width = (int(size) for size in found["image_grid_thw"][0])
        values, grid = np.ascontiguousarray(found["pixel_values"], dtype=np.float32), (frames, height, width)
        return Image(grid, values, media_hash(values, grid))

    def _read(self, url: str, field: str) -> bytes:
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            head, comma, body = url.partition(",")
            if not (comma and head.endswith(";base64")):
                raise bad_request("send a data URL in base64: data:image/png;base64,...", field)
            try:
                return base64.b64decode(body, validate=True)
            except ValueError as error:
                raise bad_request(f"the data URL is not base64: {error}", field) from None
        if scheme == "file":
            return self._read_file(url, field)
        raise bad_request("this gateway does not fetch URLs: send a data URL, or a file URL below --images-root", field)

    def _read_file(self, url: str, field: str) -> bytes:
        if self._root is None:
            raise bad_request("this gateway reads no files: start it with --images-root, or send a data URL", field)
        try:
            parts = urlsplit(url)
            path = Path(unquote(parts.path)).resolve()
            inside = parts.netloc in ("", "localhost") and path.is_relative_to(self._root) and path.is_file()
            if not inside or path.stat().st_size > _MOST_FILE_BYTES:
                raise bad_request("no such file below --images-root, or the file is too large", field)
            return path.read_bytes()
        except (OSError, ValueError, RuntimeError):  # no URL, links in a circle, a name with a null
            raise bad_request("the file cannot be read", field) from None


def _as_shown(picture: Any) -> Any:
    """A picture of Pillow in RGB as a viewer with a white page shows it.

    It is turned as its EXIF tag says, on white where it is transparent, and 16 bits of grey are 8.
    """
    from PIL import ExifTags
    from PIL import Image as Pillow

    try:
        orientation = picture.getexif().get(ExifTags.Base.Orientation)
    except SyntaxError:  # no EXIF data; the pixels may be right
        orientation = None
    if picture.mode.startswith("I"):  # a conversion would make white of every value above 255
        picture = Pillow.fromarray((np.asarray(picture) // 257).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Pillow.alpha_composite(Pillow.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert("RGB")
    return picture.transpose(Pillow.Transpose[_TRANSPOSES[orientation]]) if orientation in _TRANSPOSES else picture


def _pillow_processor(folder: Path) -> Any:
    """The image processor of a folder, by Pillow: transformers' automatic class may ask for torchvision."""
    import transformers

    kind = json.loads((folder / "preprocessor_config.json").read_text()).get("image_processor_type")
    by_pillow = getattr(transformers, f"{str(kind).removesuffix('Fast')}Pil", None)
    if by_pillow is not None:
        return by_pillow.from_pretrained(str(folder), local_files_only=True)
    return transformers.AutoImageProcessor.from_pretrained(
        str(folder), trust_remote_code=False, local_files_only=True, backend="pil"
    )
