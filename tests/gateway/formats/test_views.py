"""The views of a completion: what is shown where one of them cannot be made."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rollout_gateway.answers.text_pieces import TextPieces
from rollout_gateway.answers.views import CompletionViews
from rollout_gateway.formats.regions import AnswerRegion, Mark
from tests.support.gateway.cuts import format_of
from trainer_bridge.client.results import Completion
from trainer_bridge.wire.finish_reasons import FinishReason

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
REGIONS = format_of(tools="hermes", reasoning="think")


def shown(
    text: str, seed: int, most_calls: int | None = None, regions: Sequence[AnswerRegion] = REGIONS
) -> tuple[str, str, list[str], dict[str, str]]:
    """Reasoning, content, calls and what is missing of an answer that arrives in pieces."""
    views, chance = CompletionViews(TextPieces(False), regions, most_calls=most_calls), random.Random(seed)
    reasoning, content, calls = "", "", []
    while text:
        count = chance.randint(1, len(text))
        head, text = text[:count], text[count:]
        ids, numbers = np.zeros(count, np.int32), np.zeros(count, np.float32)
        reason: FinishReason | None = None if text else "length"
        piece = views.take(Completion(0, ids, numbers, numbers, [(0, count)], finish_reason=reason, text=head))
        reasoning, content = reasoning + piece.reasoning, content + piece.content
        calls += [call.name for call in piece.calls]
    return reasoning, content, calls, views.missing


@pytest.mark.parametrize("seed", range(12))
def test_text_stays_whole_where_a_format_fails(seed: int) -> None:
    class Failing:
        def search(self, *arguments: object, **options: object) -> None:
            raise RuntimeError("a pattern of a checkpoint")

    failing = tuple(
        replace(region, close=Mark(Failing(), literal=True)) if region.kind == "calls" else region for region in REGIONS
    )
    text = f"<think>hm</think> so \n {CALL} \n and {CALL} more"
    reasoning, content, calls, missing = shown(text, seed, regions=failing)
    assert re.sub("</?think>", "", reasoning + content) == re.sub(
        "</?think>", "", text
    )  # marks that were read may be out
    assert calls == [] and "a pattern" in missing["message"]


@pytest.mark.parametrize("seed", range(6))
def test_calls_after_those_that_are_wanted_are_left_out(seed: int) -> None:
    found = shown(f"a {CALL}\n{CALL} {CALL}", seed, most_calls=1)
    assert found[1:3] == ("a", ["f"]) and list(found[3]) == ["tool_calls"]
    assert shown(f"a {CALL}", seed, most_calls=1)[1:] == ("a", ["f"], {})
