"""Whether the worker serves, for `/health` on the metrics port."""

from __future__ import annotations

from collections.abc import Callable


class Health:
    """Answers from the moment the port is open, which is before the model is loaded.

    The threads of the metrics port call `reason`; the worker calls `watch` once it takes requests.
    """

    def __init__(self) -> None:
        self._ask: Callable[[], str] = _starting

    def watch(self, ask: Callable[[], str]) -> None:
        """From now on call `ask`, which returns why the worker does not serve, or an empty string if it does."""
        self._ask = ask

    def reason(self) -> str:
        """Why the worker does not serve; empty if it does. Any thread may call this."""
        return self._ask()


def _starting() -> str:
    return "the worker is starting"
