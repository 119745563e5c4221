"""`recomputed` and `kv_versions` at the client: read, put together from chunks, cut, kept in a journal, sent along."""

from typing import Any

import numpy as np
import pytest

from trainer_bridge.client.assembly import Assembler, tail
from trainer_bridge.client.generate_request import plan_request
from trainer_bridge.client.journal import Journal
from trainer_bridge.client.results import Chunk, Completion, read_completion
from trainer_bridge.wire.errors import ProtocolError


def part(offset: int, tokens: int, *marks: tuple[int, int], **more: Any) -> Completion:
    logprobs = np.zeros(tokens, np.float32)
    ids = np.arange(offset, offset + tokens, dtype=np.int32)
    return Completion(0, ids, logprobs, logprobs, [(1, tokens)], **{"recomputed": list(marks), "seed": 5, **more})


def test_chunks_put_together_have_the_marks_of_all() -> None:
    assembler = Assembler(1, prior=part(0, 2, (1, 3)))
    assembler.add(Chunk(2, part(2, 3, (2, 4))))
    assembler.add(Chunk(5, part(5, 1, finish_reason="length")))
    whole = assembler.joined(0)
    assert whole.recomputed == [(1, 3), (2, 4)] and len(whole) == 6
    assert tail(whole, 2).recomputed == [(2, 4)] and tail(whole, 3).recomputed == []


def test_a_completion_that_goes_on_takes_its_marks_along() -> None:
    plan = plan_request([1], {"continue_from": part(0, 4, (1, 3))})
    assert plan.fields["continue_from"]["recomputed"] == [[1, 3]]
    assert "recomputed" not in plan_request([1], {"continue_from": part(0, 4)}).fields["continue_from"]
    given = plan_request([1], {"continue_from": {"token_ids": [1, 2], "seed": 1, "recomputed": [[1, 3]]}})
    assert given.prior is not None and given.prior.recomputed == [(1, 3)]


def test_runs_of_kv_go_the_same_way(tmp_path) -> None:
    runs = [(1, 3, 64), (1, 4, 16)]
    assembler = Assembler(1, prior=part(0, 2, kv_versions=runs))
    assembler.add(Chunk(2, part(2, 3, kv_versions=[(2, 5, 80)], finish_reason="length")))
    whole = assembler.joined(0)
    assert whole.kv_versions == [*runs, (2, 5, 80)] and tail(whole, 2).kv_versions == [(2, 5, 80)]
    plan = plan_request([1], {"continue_from": whole, "max_kv_age": 0})
    assert plan.fields["continue_from"]["kv_versions"] == [[1, 3, 64], [1, 4, 16], [2, 5, 80]]
    assert plan.fields["max_kv_age"] == 0
    given = plan_request([1], {"continue_from": {"token_ids": [1, 2], "seed": 1, "kv_versions": [[1, 3, 64]]}})
    assert given.prior is not None and given.prior.kv_versions == [(1, 3, 64)]
    journal = Journal(tmp_path / "journal", "never")
    journal.begin("r", "mark", 5, 0.0, {"prompt": [1]})
    journal.add("r", Chunk(0, part(0, 4, kv_versions=runs)))
    saved = journal.read("r")
    journal.close()
    assert saved is not None and saved.chunks[0].part.kv_versions == runs


def test_half_a_character_that_ended_a_text_is_not_text_that_is_there() -> None:
    """It comes whole with the next token: counted, it would be left out."""
    plan = plan_request([1], {"continue_from": part(0, 4, text="aä\ufffd"), "return_text": True})
    assert plan.fields["continue_from"]["text_chars"] == 2
    assembler = Assembler(1, plan.prior)
    assembler.add(Chunk(4, part(4, 1, text="ßb", finish_reason="length")))
    assert assembler.joined(0).text == "aäßb"


def test_a_journal_keeps_marks(tmp_path) -> None:
    journal = Journal(tmp_path / "journal", "never")
    journal.begin("r", "mark", 5, 0.0, {"prompt": [1]})
    journal.add("r", Chunk(0, part(0, 4, (1, 3))))
    saved = journal.read("r")
    journal.close()
    assert saved is not None and saved.chunks[0].part.recomputed == [(1, 3)]


@pytest.mark.parametrize("marks", [3, [3], [[1]], [["1", 2]], {"a": 1}])
def test_marks_that_cannot_be_read_are_a_protocol_error(marks: Any) -> None:
    fields = {"index": 0, "token_ids": [1], "logprobs": [0.0], "raw_logprobs": [0.0], "versions": [[1, 1]]}
    with pytest.raises(ProtocolError, match="recomputed"):
        read_completion({**fields, "recomputed": marks})
    with pytest.raises(ProtocolError, match="kv_versions"):
        read_completion({**fields, "kv_versions": marks})


def test_runs_of_kv_have_three_numbers() -> None:
    fields = {"index": 0, "token_ids": [1], "logprobs": [0.0], "raw_logprobs": [0.0], "versions": [[1, 1]]}
    assert read_completion({**fields, "kv_versions": [[0, 3, 64]]}).kv_versions == [(0, 3, 64)]
    with pytest.raises(ProtocolError, match="position, version, tokens"):
        read_completion({**fields, "kv_versions": [[0, 3]]})
