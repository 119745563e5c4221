"""`load_adapter` and `unload_adapter`: a background thread reads the folder, then the loop takes the adapter.

message --path below the root--> executor --read, check--> service thread --PutAdapter--> loop --Done or Failed--> reply
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollout.models.lora_slots import AdapterWeights
from rollout.service.connections import ReplyAddress
from trainer_bridge.wire.errors import BadRequest, InternalError, Overloaded, RolloutError

logger = logging.getLogger(__name__)

_MAX_WAITING = 64


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


class AdapterLoads:
    """Reads adapters on a background thread; called on the service thread and continues there."""

    def __init__(self, folders: AdapterFolders, post: Callable[[Callable[[], None]], None]) -> None:
        self._folders = folders
        self._post = post
        self._waiting: dict[int, ReplyAddress] = {}
        self._serial = 0
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="service-adapters")

    def load(
        self,
        peer: ReplyAddress,
        path: str,
        then: Callable[[AdapterWeights], None],
        refuse: Callable[[ReplyAddress, RolloutError], None],
    ) -> None:
        """Read a folder, then call `then` or `refuse`. Raises `RolloutError` for a wrong path."""
        folder = self._folders.resolve(path)
        if len(self._waiting) >= _MAX_WAITING:
            raise Overloaded("too many adapters are waiting to load; try again later", retry_after_s=1.0)
        self._serial += 1
        self._waiting[self._serial] = peer
        finish = partial(self._finish, self._serial, then, refuse)
        reading = self._executor.submit(self._folders.read, folder, time.monotonic())
        reading.add_done_callback(lambda future: self._post(partial(finish, future)))

    def waiting(self) -> list[ReplyAddress]:
        return list(self._waiting.values())

    def close(self) -> None:
        """Drop work that has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _finish(
        self,
        number: int,
        then: Callable[[AdapterWeights], None],
        refuse: Callable[[ReplyAddress, RolloutError], None],
        future: Future[AdapterWeights],
    ) -> None:
        peer = self._waiting.pop(number)
        try:
            then(future.result())
        except RolloutError as error:
            refuse(peer, error)
        except ValueError as error:
            refuse(peer, BadRequest(f"{error}"[:2000], field="path"))
        # A fault of ours must not end the service for other clients.
        except Exception:
            logger.exception("an adapter could not be read", extra=peer.request_fields)
            refuse(peer, InternalError("a fault in the worker; its log has the trace"))
        finally:
            # The frames of a traceback refer to the future, and keep the read weights until a garbage collection.
            if not future.cancelled() and (failure := future.exception()) is not None:
                failure.__traceback__ = None
