"""Engines that draft from recorded completions, with some of the drafts wrong."""

import functools
import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch

from rollout.engine.features.all import FEATURES, MakeFeature
from rollout.engine.features.drafts.drafter import DeviceDrafter
from rollout.engine.features.drafts.model_drafter import READ, ModelDrafter
from rollout.engine.features.drafts.step_costs import StepCosts
from rollout.engine.features.drafts.verifier import DraftVerifier
from rollout.engine.schedule.step_feature import find_feature
from rollout.engine.sequence.sequence import Sequence
from rollout.engine.step.device_step import DeviceStep
from rollout.engine.step.row_state import LENGTH, PROMPT, SEED
from rollout.engine.step.sampler import Sampler
from tests.support.engine.harness import VOCAB, Bench

Recorded = Mapping[tuple[str, int], Seq[int]]


class ReplayDrafter:
    """The recorded tokens, each wrong with probability `wrong`; some paths are short or missing."""

    def __init__(
        self, recorded: Recorded, wrong: float, seed: int = 0, ragged: bool = False, vocab: int = VOCAB
    ) -> None:
        self.recorded, self.wrong, self.ragged, self.vocab = recorded, wrong, ragged, vocab
        self.rng = random.Random(seed)
        self.ends: list[tuple[str, int]] = []
        self.told: dict[tuple[str, int], int] = {}  # tokens of each completion

    def path(self, key: Sequence, prompt: np.ndarray, tokens: Seq[int], want: int, version: int = 0) -> list[int]:
        self.told[key.group.key[1], key.index] = len(tokens)
        path = list(self.recorded.get((key.group.key[1], key.index), ()))[len(tokens) :][:want]
        path = [token if self.rng.random() >= self.wrong else (token + 1) % self.vocab for token in path]
        path += [self.rng.randrange(self.vocab) for _ in range(want - len(path))]  # after the end, too
        return path[: self.rng.randint(0, want)] if self.ragged else path

    def source(self, key: Sequence) -> int | None:
        return None

    def ended(self, key: Sequence) -> None:
        self.ends.append((key.group.key[1], key.index))


class FixedCosts(StepCosts):
    """Whatever steps take."""

    knows_plain = True

    def ran(self, rows, context, drafts, seconds):
        pass


def fixed_costs(measured: Mapping[int, float] | None = None, drafting: Mapping[int, float] | None = None) -> dict:
    """A field for `Bench`: steps and drafts cost what is given, by rows; by default nothing but the step itself."""
    costs = FixedCosts(dict(measured or {1: 1.0, 72: 1.0}), padded=False, drafting=dict(drafting or {}))
    verifier = functools.partial(DraftVerifier.make, measure=lambda *_: costs)
    return {"features": [verifier if make == DraftVerifier.make else make for make in FEATURES]}


def drafting(
    model,
    recorded: Recorded,
    wrong: float,
    seed: int = 0,
    ragged: bool = False,
    bench: type[Bench] = Bench,
    **fields,
) -> tuple[Bench, ReplayDrafter]:
    """An engine that drafts by a `ReplayDrafter`; `fields` as for `Bench`."""
    drafter = ReplayDrafter(recorded, wrong, seed, ragged, model.spec.vocab)
    features = _verifying(fields.pop("features", FEATURES), host_drafter=lambda verifier: drafter)
    return bench(model, features=features, **{"speculation": "suffix", **fields}), drafter


class ReplayedModel(ModelDrafter):
    """The recorded tokens, by the seed of their row, each wrong with probability `wrong`; the model runs, too.

    The host puts them into the row state, so on a GPU this work is not captured.
    """

    recorded: Mapping[int, Seq[int]]
    wrong: float
    rng: random.Random

    def decode_work(self, size, max_context, kv):
        return {READ: super().decode_work(size, max_context, kv)[READ]}

    def draft(self, count, max_context, needs, kv):
        super().draft(count, max_context, needs, kv)
        if self.positions_B.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # at start-up
        vocab, rng = self._head.vocab, self.rng
        for row in self._rows_R[:count].tolist():
            ints = self.rows.ints[row]
            at = int(ints[LENGTH] - ints[PROMPT]) + 1
            tokens = list(self.recorded.get(int(ints[SEED]), ())[at : at + self.most])
            tokens = [token if rng.random() >= self.wrong else (token + 1) % vocab for token in tokens]
            tokens += [rng.randrange(vocab) for _ in range(self.most - len(tokens))]
            self.next_RG[row] = torch.tensor(tokens)


def replayed_drafts(
    recorded: Mapping[int, Seq[int]], wrong: float, seed: int = 0, features: Seq[MakeFeature] = FEATURES
) -> dict:
    """A field for `Bench`: these features, with a `ReplayedModel` in place of the draft model's drafter."""
    how = {"recorded": recorded, "wrong": wrong, "rng": random.Random(seed)}
    return {"features": _verifying(features, model_drafter=type("Replayed", (ReplayedModel,), how))}


def _verifying(features: Seq[MakeFeature], **attributes: object) -> list[MakeFeature]:
    """These features, with a subclass that has other attributes in place of the `DraftVerifier`."""
    found = []
    for make in features:
        method = make.func if isinstance(make, functools.partial) else make
        kind = getattr(method, "__self__", None)
        if isinstance(kind, type) and issubclass(kind, DraftVerifier):
            how = make.keywords if isinstance(make, functools.partial) else {}
            other: type[DraftVerifier] = type("Verifier", (kind,), attributes)
            make = functools.partial(other.make, **how)
        found.append(make)
    return found


def drafter_of(bench: Bench) -> DeviceDrafter:
    """The drafter on the device."""
    verifier = find_feature(bench.engine.executor.step.features, DraftVerifier)
    assert verifier is not None
    return verifier.drafter


def watch_drafts(bench: Bench) -> list[tuple[list[int], list[float], list[int]]]:
    """A list that gets the row state of each row that the device drafts for: integers, floats, and its drafts."""
    seen, drafter = [], drafter_of(bench)
    run = drafter.run

    def watch(step, *how):
        run(step, *how)
        rows = step["sampled_rows"] if step.header.layout else step["bases"][:, 0] if "bases" in step else step["rows"]
        for row in rows.tolist() if step.header.draws else []:
            state = drafter.rows
            seen.append((state.ints[row].tolist(), state.floats[row].tolist(), drafter.next_RG[row].tolist()))

    drafter.run = watch
    return seen


def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have decode steps run a row after the other, forward and draw; for rows without a constraint.

    torch's results on a CPU depend in their last bits on the other rows: products on the number of rows, attention on
    the longest context, the exponential on a value's place in the tensor.
    """
    draw = Sampler.__call__

    def decode(self, step, experts):
        logits, hidden, positions = [], [], []
        verifier = find_feature(self.features, DraftVerifier)
        heads = verifier.drafter if verifier is not None and isinstance(verifier.drafter, ModelDrafter) else None
        for i, row in enumerate(step["rows"]):
            context = int(self.rows.ints[row, LENGTH]) + 1
            batch = self.begin_decode(row[None], step["new_pages"][i : i + 1], context)
            logits.append(self.forward.compute_logits(self.forward(*batch, self.kv)))
            if heads is not None:
                hidden.append(heads.taps.hidden_TF[:1].clone())
                positions.append(batch[1].positions_T)
        if heads is not None:
            heads.taps.hidden_TF[: len(hidden)] = torch.cat(hidden)
            heads.positions_B[: len(positions)] = torch.cat(positions)
        return torch.cat(logits), step["rows"]

    def draw_each(self, logits_SV, rows_S, features, output_4R, masks=None):
        for i in range(len(rows_S)):
            draw(self, logits_SV[i : i + 1], rows_S[i : i + 1], features, output_4R[:, i : i + 1])

    monkeypatch.setattr(DeviceStep, "decode", decode)
    monkeypatch.setattr(Sampler, "__call__", draw_each)
