"""A process that adds the rule `floor_penalty` to the table and follows it from the client to the torch twin.

    python -m tests.support.engine.made_up_rule CHECKPOINT

Prints the names of the places at which the value arrived.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import rollout_kernels
import torch
from rollout_kernels.sampling import reference

from trainer_bridge.wire import sampling_rules as table
from trainer_bridge.wire.declarations import entries_of


@dataclass(frozen=True, slots=True)
class Rules(table.SamplingRules):
    """The table with one more entry."""

    floor_penalty: float = table.rule(-1.0, "penalty", "a made-up rule", least=-1, most=9, off=-5.0)


@dataclass(frozen=True, slots=True)
class Rows(reference.SamplingRows):
    """The settings of the torch twin with one more field."""

    floor_penalty_S: torch.Tensor | None = None


table.SamplingRules, table.RULES = Rules, entries_of(Rules, table.SamplingRule)  # type: ignore[misc]
table.SamplingFields.__annotations__["floor_penalty"] = float
rollout_kernels.SamplingRows = Rows  # type: ignore[misc]

# Everything below is made from the table when it is imported.
from rollout.engine.step.row_state import FIRST_FLOAT_RULE, FLOAT_RULES  # noqa: E402
from rollout.service.requests.schema import GenerateMessage, parse_request  # noqa: E402
from rollout_gateway.dialects.sglang import SglangParams  # noqa: E402
from rollout_gateway.dialects.vllm import GenerateParams  # noqa: E402
from rollout_gateway.requests.chat_body import ChatBody, ExtraFields  # noqa: E402
from tests.support.engine.harness import Bench, load  # noqa: E402
from trainer_bridge.client.generate_request import plan_request  # noqa: E402
from trainer_bridge.wire.errors import RolloutError  # noqa: E402


def main(checkpoint: Path) -> None:
    """Follow the value 2.5."""
    fields = plan_request([1, 2, 3], {"floor_penalty": 2.5}).fields
    assert fields["sampling"] == {"floor_penalty": 2.5}
    print("header")

    header = {"v": 1, "op": "generate", "id": "a", **fields}
    message = parse_request(header)
    assert isinstance(message, GenerateMessage)
    sampling = message.sampling
    assert sampling.rules["floor_penalty"] == 2.5
    try:
        parse_request({**header, "sampling": {"floor_penalty": 9.5}})
    except RolloutError as error:
        assert error.field == "sampling.floor_penalty"
        print("schema")

    for body in (ChatBody, GenerateParams, SglangParams):
        given = {"floor_penalty": 2.5} | ({"messages": []} if body is ChatBody else {})
        assert body.take(given).worker_fields("")["floor_penalty"] == 2.5
    assert "floor_penalty" in ExtraFields.take({"floor_penalty": 2.5}).extras()
    print("gateway")

    seen: list[list[float]] = []
    change_logits = reference.change_logits

    def watched(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        if rows.floor_penalty_S is not None:
            seen.append(rows.floor_penalty_S.tolist())
        return change_logits(logits, rows)

    reference.change_logits = watched
    bench = Bench(load(checkpoint))
    bench.submit("with", [1, 2, 3], 4, sampling=sampling.rules)
    bench.complete("without", [4, 5, 6], 4, sampling={})
    column = FIRST_FLOAT_RULE + [rule.name for rule in FLOAT_RULES].index("floor_penalty")
    values = set(bench.engine.executor.step.rows.floats[1:, column].tolist())
    if {2.5, -5.0} <= values:
        print("row")
    if any(set(step) == {2.5, -5.0} for step in seen):
        print("twin")
    bench.close()


main(Path(sys.argv[1]))
