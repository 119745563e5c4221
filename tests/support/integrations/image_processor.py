"""A processor of text and images for tiny models: transformers' image processor and a tokenizer.

Those of Qwen need torchvision, for videos. This one does with a text what they do: a placeholder for each token.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, BatchFeature, ProcessorMixin, Qwen2VLImageProcessorPil

from tests.support.models.images import IMAGE


class WordsAndImages(ProcessorMixin):
    """The processor of a folder of `add_processor`."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.image_token_id = "<image>", IMAGE
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> WordsAndImages:  # type: ignore[override]
        """The processor of a folder. Options of transformers make no difference."""
        tokenizer = AutoTokenizer.from_pretrained(folder)
        images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        return cls(images, tokenizer, tokenizer.chat_template)

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> BatchFeature:
        texts = [text] if isinstance(text, str) else list(text)
        tensors = options.pop("return_tensors", None)
        options = {name: value for name, value in options.items() if name in ("padding", "padding_side", "truncation")}
        pixels: dict[str, Any] = {}
        if images is not None:
            flat = [each for part in images for each in part] if isinstance(images[0], (list, tuple)) else list(images)
            pixels = dict(self.image_processor(images=flat, return_tensors="pt"))
            lengths = iter([math.prod(grid) // 4 for grid in pixels["image_grid_thw"].tolist()])
            for i, each in enumerate(texts):
                head, *rest = each.split(self.image_token)
                texts[i] = head + "".join(self.image_token * next(lengths) + after for after in rest)
        encoded = self.tokenizer(texts, add_special_tokens=False, **options)
        encoded["mm_token_type_ids"] = [[int(token == IMAGE) for token in row] for row in encoded["input_ids"]]
        return BatchFeature({**encoded, **pixels}, tensor_type=tensors)

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw"]
