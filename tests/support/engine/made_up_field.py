"""A process that adds the field `floor` to the table of requests, and follows it from the client to a feature and back.

    python -m tests.support.engine.made_up_field CHECKPOINT

Prints the names of the places at which the value arrived.
"""

import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

from trainer_bridge.wire import request_fields as table
from trainer_bridge.wire.declarations import declared, entries_of

_ENTRY = declared(None, "a made-up field", least=0, most=9, feature="floors", flag="--floors", needs=("session",))
table.EngineFields = make_dataclass(  # type: ignore[misc]
    "Fields", [("floor", float | None, _ENTRY)], bases=(table.EngineFields,), frozen=True, slots=True, kw_only=True
)
table.ENGINE_FIELDS = entries_of(table.EngineFields, table.RequestField)
table.EngineArguments.__annotations__["floor"] = float | None

# Everything below is made from the table when it is imported.
from rollout.config import ServiceSettings  # noqa: E402
from rollout.engine.features.all import FEATURES  # noqa: E402
from rollout.engine.messages.to_service import Event, Rejected  # noqa: E402
from rollout.engine.schedule.step_feature import RequestFeature, StepFeature  # noqa: E402
from rollout.engine.sequence.sequence import Group  # noqa: E402
from rollout.engine.step.device_feature import DeviceFeature, HostParts, Site  # noqa: E402
from rollout.service.capabilities import Outbox, ServedEngine, ServedModel  # noqa: E402
from rollout.service.server import Server  # noqa: E402
from tests.support.engine.harness import Bench, load  # noqa: E402
from trainer_bridge.integrations.background import BackgroundClient  # noqa: E402
from trainer_bridge.wire.errors import BadRequest  # noqa: E402


class Floors(RequestFeature):
    """Serves floors up to 5."""

    name = "floors"

    def enter(self, group: Group) -> Rejected | None:
        floor = group.request.floor  # type: ignore[attr-defined]
        if floor is None or floor <= 5:
            return None
        return Rejected(group.key, "bad_request", f"{floor} is too high for this feature", "floor")


class FloorTaker(DeviceFeature[None]):
    """Its part on the device, which does nothing."""

    name = "floors"

    @classmethod
    def make(cls, site: Site) -> "FloorTaker":
        return cls()

    def host_part(self, engine: HostParts, before: StepFeature | None) -> Floors:
        return Floors()


class ServedBench(Bench):
    """An engine with a service and a client."""

    def __init__(self, checkpoint: Path, **options: Any) -> None:
        self._outbox = Outbox()
        super().__init__(load(checkpoint), **options)
        engine = ServedEngine(self.engine.inbox, self.status, self._outbox)
        self._server = Server(ServiceSettings(bind="tcp://127.0.0.1:0"), ServedModel("tiny", 97, 64), engine)
        self._server.start()
        self._client = BackgroundClient(self._server.endpoint)

    def emit(self, events: list[Event]) -> None:
        self._outbox.put(events)

    def ask(self, **fields: Any) -> str:
        """The end of a completion, or the words of its refusal."""
        asked = self._client.generate([1, 2, 3], max_tokens=2, **fields)
        while not asked.done():
            self.engine.wait(0.01)
            self.engine.tick()
        try:
            return str(asked.result().completions[0].finish_reason)
        except BadRequest as error:
            assert error.field == "floor", error
            return str(error)

    def close(self, check: bool = True) -> None:
        self._client.close()
        self._server.stop()
        super().close(check)


def main(checkpoint: Path) -> None:
    """Ask a worker without the feature, and one with it."""
    without = ServedBench(checkpoint)
    assert without.ask() == "length"
    assert "less than or equal to 9" in without.ask(floor=12.0, session="s")
    print("range")
    assert "'floor' needs 'session'" in without.ask(floor=2.0)
    print("needs")
    refused = without.ask(floor=2.0, session="s")
    assert "does not offer 'floor'" in refused and "--floors" in refused
    print("lacks")
    without.close()

    served = ServedBench(checkpoint, features=[*FEATURES, FloorTaker.make])
    assert served.ask(floor=2.0, session="s") == "length"
    assert "7.0 is too high" in served.ask(floor=7.0, session="s")
    print("feature")
    served.close()


main(Path(sys.argv[1]))
