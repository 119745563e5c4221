"""The folder of adapters that `load_adapter` reads.

message --path below the root--> `SlowAnswers` reads, checks --PutAdapter--> loop --Done or Failed--> reply
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout.models.lora_slots import AdapterWeights
from trainer_bridge.wire.errors import BadRequest


@dataclass(frozen=True, slots=True)
class AdapterFolders:
    """The folder of adapters. `read` prepares one for a slot, or raises ValueError, `Overloaded` or `InternalError`.

    It gets the folder, and the `time.monotonic` at which the adapter was asked for.
    """

    root: Path | None  # adapters are below it; None: none can be loaded
    read: Callable[[Path, float], AdapterWeights]

    def resolve(self, path: str) -> Path:
        """A folder below the root, links resolved. Raises `RolloutError`."""
        if self.root is None:
            raise BadRequest(
                "this worker loads no adapters by path; start it with --adapter-root FOLDER (engine.adapter_root)",
                field="path",
            )
        if "\0" in path:
            raise BadRequest("the path contains a NUL character; remove it", field="path")
        root = self.root.resolve()
        try:
            folder = (root / path).resolve()
            folder.exists()  # raises for a name that is too long, which `resolve` lets pass
        except (OSError, RuntimeError):  # links in a circle, names that are too long
            raise BadRequest("the path cannot be resolved; check its links and length", field="path") from None
        if not folder.is_relative_to(root):
            raise BadRequest(
                "the path leads out of --adapter-root (engine.adapter_root); choose one below it", field="path"
            )
        return folder

    def reading(self, path: str) -> Callable[[], AdapterWeights]:
        """The work of reading a folder below the root. Raises `RolloutError` for a wrong path."""
        folder, asked_s = self.resolve(path), time.monotonic()

        def read() -> AdapterWeights:
            try:
                return self.read(folder, asked_s)
            except ValueError as error:
                raise BadRequest(f"{error}"[:2000], field="path") from None

        return read
