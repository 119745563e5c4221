"""Messages whose answer needs slow work: reports, and adapters in a folder.

message --begin--> thread --work--> service thread --then--> the answer, or an error
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import TypeVar

from rollout.service.connections import ReplyAddress
from rollout.service.delivery.replies import as_error
from trainer_bridge.wire.errors import Overloaded, RolloutError

Result = TypeVar("Result")


class SlowAnswers:
    """Works for one message at a time, on a thread of its own; called on the service thread, where it continues.

    At most `most` messages wait, called `what`, and more than one only up to `most_bytes`. `refuse` sends an error.
    """

    def __init__(
        self,
        what: str,
        most: int,
        post: Callable[[Callable[[], None]], None],
        refuse: Callable[[ReplyAddress, RolloutError], None],
        most_bytes: int = 0,
    ) -> None:
        self._what, self._most, self._most_bytes = what, most, most_bytes
        self._post, self._refuse = post, refuse
        self._serial = count()
        self._waiting: dict[int, tuple[ReplyAddress, int]] = {}  # reply address, and bytes of the message
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"service-{what}")

    def begin(
        self, peer: ReplyAddress, work: Callable[[], Result], then: Callable[[Result], None], nbytes: int = 0
    ) -> None:
        """Call `then` with the outcome of `work`. Raises `RolloutError` if too many messages wait."""
        full = self._waiting and nbytes + sum(waiting for _, waiting in self._waiting.values()) > self._most_bytes
        if full or len(self._waiting) >= self._most:
            raise Overloaded(f"too many {self._what} are waiting; try again later", retry_after_s=1.0)
        number = next(self._serial)
        self._waiting[number] = peer, nbytes
        finish = partial(self._finish, number, then)
        self._executor.submit(work).add_done_callback(lambda future: self._post(partial(finish, future)))

    def waiting(self) -> list[ReplyAddress]:
        return [peer for peer, _ in self._waiting.values()]

    def close(self) -> None:
        """Drop work that has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _finish(self, number: int, then: Callable[[Result], None], future: Future[Result]) -> None:
        peer, _ = self._waiting.pop(number)
        try:
            then(future.result())
        # A fault of ours must not end the service for other clients.
        except Exception as error:
            self._refuse(peer, as_error(error, f"work on {self._what} failed", peer.request_fields))
        finally:
            # The frames of a traceback refer to the future, and keep what was read until a garbage collection.
            failure = None if future.cancelled() else future.exception()
            while failure is not None:
                failure.__traceback__, failure = None, failure.__context__
