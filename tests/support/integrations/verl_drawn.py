"""A data set for verl whose messages have pictures. verl loads this file by its path.

verl's own reader of pictures needs a package of videos, which not every machine has.
"""

from __future__ import annotations

from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset


class Drawn(RLHFDataset):
    """A data set whose messages have pictures, not references to files."""

    @classmethod
    async def process_multi_modal_info(cls, messages: list[Any], **options: Any) -> tuple[Any, Any, Any]:
        """The pictures of the messages."""
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        pictures = [part["image"] for parts in contents for part in parts if part["type"] == "image"]
        return pictures or None, None, None
