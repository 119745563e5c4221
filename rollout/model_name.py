"""The name of a model for people: in `/v1/models` of a gateway, and of runs in W&B."""

import re
from pathlib import Path


def readable_name(model: str) -> str:
    """A hub id, also for a folder in the hub's cache; the last part of another folder's path."""
    path = Path(model)
    if cached := re.fullmatch(r".*/models--([^/]+)/snapshots/[^/]+", str(path)):
        return cached[1].replace("--", "/")
    return model if re.fullmatch(r"[^/.~][^/]*(/[^/]+)?", model) else path.name or model
