"""A conversation with one worker, which keeps its KV between the turns: what `client.session()` gives.

    with client.session(lease_s=600) as chat:
        first = chat.generate(prompt, max_tokens=512)
        second = chat.generate([*prompt, *first.completions[0].token_ids, *answer], max_tokens=512)

A turn's prompt is the whole conversation. The worker compares it, token by token, with what the session holds, and
computes what comes after. So send token ids: text that is tokenized anew may come out otherwise. A session that was
lost (its lease is over, its pages were needed, its worker was started again, the weights changed) costs time and
changes no result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, Unpack

from trainer_bridge.client.generate_request import GenerateFields, Prompt
from trainer_bridge.client.results import GenerateResult

if TYPE_CHECKING:
    from trainer_bridge.client.asynchronous import AsyncRolloutClient
    from trainer_bridge.client.blocking import RolloutClient
    from trainer_bridge.client.core import ClientCore


def end_session(core: ClientCore, session: str) -> None:
    """Tell the worker of a session that it is over, or all if it is not known which one that is.

    Those that are gone hold nothing. What the others answer is of no interest.
    """
    known = core.sessions.pop(session, None)
    for place in range(len(core.connections)) if known is None else (known,):
        connection = core.connections[place]
        if not connection.gone and not connection.socket.closed:
            core.start("end_session", {"session": session}, place)


class Session:
    """Turns of one conversation, one at a time. `id` and `lease_s` are what each turn sends with it."""

    def __init__(self, client: RolloutClient, session_id: str, lease_s: float | None) -> None:
        self.id = session_id
        self.lease_s = lease_s
        self._client = client

    def generate(self, prompt: Prompt | None = None, **fields: Unpack[GenerateFields]) -> GenerateResult:
        """The next turn: as `RolloutClient.generate`, for one completion. `cached_tokens` says what was reused."""
        fields["session"], fields["session_lease_s"] = self.id, self.lease_s
        return self._client.generate(prompt, **fields)

    def end(self) -> None:
        """Have the worker give back what it holds; does not wait for it."""
        self._client.end_session(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()


class AsyncSession:
    """As `Session`."""

    def __init__(self, client: AsyncRolloutClient, session_id: str, lease_s: float | None) -> None:
        self.id = session_id
        self.lease_s = lease_s
        self._client = client

    async def generate(self, prompt: Prompt | None = None, **fields: Unpack[GenerateFields]) -> GenerateResult:
        """As `Session.generate`."""
        fields["session"], fields["session_lease_s"] = self.id, self.lease_s
        return await self._client.generate(prompt, **fields)

    def end(self) -> None:
        """As `Session.end`."""
        self._client.end_session(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.end()
