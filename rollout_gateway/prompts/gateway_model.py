"""The model that a gateway serves: names, tokenizer, formats of answers and image processor."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config.gateway_settings import GatewaySettings
from rollout.model_name import readable_name
from rollout_gateway.formats.format_chooser import Formats
from rollout_gateway.prompts.image_processor import ImageProcessor
from rollout_gateway.prompts.tokenizer import GatewayTokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayModel:
    """The model of all workers. `names`: what requests may call it, the shown name first. `images`: None without them.

    `trusts_templates`: requests may bring chat templates.
    """

    names: tuple[str, ...]
    context_tokens: int
    text: GatewayTokenizer
    formats: Formats
    images: ImageProcessor | None
    trusts_templates: bool

    @classmethod
    def load(cls, status: dict[str, Any], settings: GatewaySettings) -> GatewayModel:
        """The model of a worker with this status. Raises ValueError for files or flags that cannot be used."""
        path = settings.model
        if path is None and Path(status["model"]).expanduser().is_dir():
            path = status["model"]
        text = GatewayTokenizer.load(path)
        if not text.available:
            log.warning("there is no tokenizer: only token ids can be sent and received; name a model with --model")
        images = None
        if text.folder is not None and "media" in (status.get("capabilities") or ()):
            images = ImageProcessor.load(text.folder, settings.images_root)
        return cls(
            names=settings.served_model_name or tuple(dict.fromkeys((readable_name(status["model"]), status["model"]))),
            context_tokens=status["max_context_tokens"],
            text=text,
            formats=text.formats(settings.tool_parser, settings.reasoning_parser),
            images=images,
            trusts_templates=settings.trust_request_chat_template,
        )

    def close(self) -> None:
        """End the threads of the tokenizer and of the image processor."""
        self.text.close()
        if self.images is not None:
            self.images.close()
