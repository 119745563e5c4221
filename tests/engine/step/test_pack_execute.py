"""A step is its upload: an executor that is sent the bytes of header and buffer computes the tokens of the engine."""

from dataclasses import fields

import msgpack
import numpy as np
import pytest
import torch

from rollout.engine.schedule.plan import PromptPart, Span, make_plan
from rollout.engine.upload import Header, Upload
from tests.support.engine.harness import Bench, watch_headers

SHAPED = {"temperature": 1.0, "top_k": 5, "presence_penalty": 0.3, "logit_bias": ((3, 2.0),)}


class Follower:
    """An engine of its own of which only the executor works, in slots of its own, from bytes."""

    def __init__(self, bench: Bench, leader: Bench) -> None:
        self._executor = bench.engine.executor
        self._slots = [bench.engine.pipeline.acquire(), bench.engine.pipeline.acquire()]
        self._leader, self._steps = leader, []
        executor = leader.engine.executor
        execute, read = executor.execute, executor.read
        executor.execute = lambda upload, slot: (self.follow(upload), execute(upload, slot))[1]
        executor.read = lambda header, slot: self.compare(read(header, slot))
        self.compared = self.prefills = 0

    def follow(self, upload: Upload) -> None:
        sent = msgpack.packb({"header": upload.header.to_fields(), "words": upload.words.numpy().tobytes()})
        fields = msgpack.unpackb(sent, strict_map_key=True)
        header = Header.from_fields(fields["header"])
        assert header == upload.header
        words = torch.from_numpy(np.frombuffer(fields["words"], np.int32).copy())
        slot = self._slots[0]
        self._slots.reverse()
        self._executor.execute(Upload(header, words), slot)
        self._steps.append((header, slot))
        self.prefills += bool(header.layout)

    def compare(self, theirs):
        ours = self._executor.read(*self._steps.pop(0))
        for name in ("tokens", "logprobs", "raw_logprobs", "drawn_logprobs"):
            assert getattr(ours, name) == getattr(theirs, name), name
        found, expected = ours.of_features.get("scores"), theirs.of_features.get("scores")
        assert (found is None) == (expected is None)
        if found is not None:
            assert np.array_equal(found.top_ids_CK, expected.top_ids_CK)
            for mine, other in ((found.narrow, expected.narrow), (found.wide, expected.wide)):
                for each in fields(mine):
                    assert np.array_equal(getattr(mine, each.name), getattr(other, each.name)), each.name
        self.compared += 1
        return theirs


@pytest.mark.parametrize("pages", [256, 40])
def test_an_executor_needs_nothing_but_the_bytes_of_an_upload(model, prompt_of, pages):
    """Chunks, groups that share a prompt, preemption, settings, scores: all of a step is in its upload."""
    sizes = {"kv_pages": pages, "prefill_chunk_tokens": 16, "max_rows": 6}
    bench, other = Bench(model, **sizes), Bench(model, **sizes)
    follower = Follower(other, bench)
    for i in range(6):
        sampling = {"seed": i, **(SHAPED if i % 2 else {"temperature": 1.0})}
        bench.submit(f"r{i}", prompt_of(7 + 9 * i, i), 20 + i, sampling=sampling, n=1 + i % 3, logprobs=2 * (i == 1))
    bench.submit("scored", prompt_of(30, 9), 5, prompt_logprobs=True)
    bench.submit("ranked", prompt_of(30, 8), 5, prompt_logprobs=True, prompt_top_logprobs=3)
    ids = np.arange(42, dtype=np.int32).reshape(21, 2)
    named = {"prompt_logprobs_last": 21, "prompt_logprob_token_ids": ids, "prompt_entropy": True}
    bench.complete("named", prompt_of(30, 7), 0, prompt_logprobs=True, prompt_top_logprobs=30, **named)
    assert follower.compared > 40 and follower.prefills > 8
    assert (bench.engine.roster.counters.preemptions > 0) == (pages == 40)
    bench.close()
    other.close(check=False)


def test_a_row_of_a_shared_prompt_takes_the_decode_forward_and_is_set_up_by_its_upload(model, prompt_of):
    bench = Bench(model)
    forwards = watch_headers(bench)
    bench.complete("a", prompt_of(20), 4, n=3, sampling={"temperature": 1.0, "seed": 1})
    assert [bool(header.layout) for header in forwards][:1] == [True], "the leader prefills the prompt"
    (shared,) = [header for header in forwards if "init_ints" in header.sections and not header.layout]
    assert shared.rows == 2 and {"known", "copies"} <= shared.sections.keys()


def test_the_kind_and_the_totals_of_a_plan_follow_from_its_spans(model, prompt_of):
    bench = Bench(model)
    bench.submit("a", prompt_of(9), 4)
    bench.submit("b", prompt_of(7, 1), 4, logprobs=1)
    bench.engine.tick()
    seqs = [group.sequences[0] for group in bench.engine.roster.groups.values()]
    part = PromptPart(np.arange(5, dtype=np.int32))
    chunks = make_plan([Span(seqs[0], 4, 5, 1, part), Span(seqs[1], 0, 5, 0, part)], 3, 4)
    assert (chunks.kind, chunks.tokens, chunks.draws, chunks.max_context) == ("prefill", 10, 1, 9)
    assert chunks.opens == [(0, seqs[0].kv.pages[1]), (1, seqs[1].kv.pages[0])], "spans that begin with a page"
    assert chunks.needs == seqs[0].group.needs, "a row that draws nothing needs nothing of the draw"
    assert chunks.sampled == seqs[:1] and not chunks.decodes
    single = make_plan([Span(seqs[0], 8, 1, 1, PromptPart(part.tokens[:1]))], 3, 4)
    assert single.kind == "prefill" and single.decodes
    decode = make_plan([Span(seq, 9, 1, 1) for seq in seqs], 3, 4)
    assert (decode.kind, decode.rows, decode.max_context) == ("decode", 2, 10) and decode.decodes
    assert decode.needs == seqs[0].group.needs | seqs[1].group.needs
    bench.run()
