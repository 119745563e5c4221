"""Drafts on the device: draft rows and accepted drafts are what a loop over rows says, by torch and by the kernels."""

import copy

import numpy as np
import pytest
import torch
from rollout_kernels.step.triton_verify import accept_drafts, set_up_drafts

from rollout.engine.features.drafts import verify
from rollout.engine.features.drafts.row_drafts import IN_ROW_STATE
from rollout.engine.step.row_state import LAST, LENGTH, RowState
from rollout.engine.upload import PLAIN, StepInput, UploadStaging, put_decode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, DRAFT_ROWS, PAGES, VOCAB, MADE = 12, 60, 1100, 50, 6


class Case:
    """A step of some rows, some of them with drafts; the row state is random. With `made` the device has made some."""

    def __init__(self, seed: int, adapters: bool, made: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.counts = rng.integers(0, 6, rng.integers(1, ROWS + 1))
        self.counts[rng.integers(len(self.counts))] = 5
        self.rows = (rng.permutation(ROWS)[: len(self.counts)] + 1).tolist()
        width = int(rng.integers(5, 12))
        spare, step_rows, verified, drafts = iter(range(ROWS + 1, ROWS + DRAFT_ROWS + 1)), [], [], []
        self.state = RowState(ROWS + DRAFT_ROWS, PAGES, VOCAB, DEVICE, ["adapters"] if adapters else [])
        self.drafts = verify.DraftState.allocate(self.state, MADE if made else 0)
        generator = torch.Generator().manual_seed(seed)
        state = self.state
        for tensor in (state.ints, state.pages, self.drafts.drafts_R, *state.columns.values(), self.drafts.next_RG):
            if tensor is not None:
                tensor.copy_(torch.randint(0, VOCAB, tensor.shape, generator=generator).to(tensor.dtype))
        self.state.floats.copy_(torch.rand(self.state.floats.shape, generator=generator))
        self.draft_rows: list[list[int]] = []
        for row, count in zip(self.rows, self.counts.tolist(), strict=True):
            place, mine = len(step_rows), [next(spare) for _ in range(count)]
            step_rows += [row, *mine]
            self.draft_rows.append(mine)
            if count:
                drafts += [(draft, row, ahead, len(verified)) for ahead, draft in enumerate(mine, 1)]
                # Some paths begin after the row, and some end before its last draft.
                begin = int(self.state.ints[row, LENGTH]) - rng.integers(-2, 9)
                in_row_state = made and rng.random() < 0.5
                verified.append((row, place, count, IN_ROW_STATE if in_row_state else max(begin, 0)))
        self.verified, self.paths = verified, rng.integers(0, VOCAB, (len(verified), width))
        staging = UploadStaging(torch.zeros(4000, dtype=torch.int32))
        put_decode(staging, step_rows, [], len(step_rows) + 3)
        for name, array in (("verified", verified), ("paths", self.paths), ("drafts", drafts)):
            staging.put(name, np.array(array, dtype=np.int64))
        count = len(step_rows)
        upload = staging.upload(count, count, count, PLAIN.value, 99, most_ahead=int(self.counts.max()))
        self.step_rows, self.step = step_rows, StepInput(upload.header, upload.words.to(DEVICE))


def set_up_by_kernel(rows: RowState, drafts: verify.DraftState, step: StepInput) -> None:
    state = rows.ints, rows.floats, rows.pages, drafts.drafts_R, rows.columns.get("adapters"), drafts.next_RG
    set_up_drafts(step["drafts"], step["verified"], step["paths"], *state, last=LAST, length=LENGTH)


def accept_by_kernel(rows: RowState, drafts: verify.DraftState, step: StepInput, output_4R, accepted_R) -> None:
    drawn = output_4R[0], drafts.drafts_R, rows.ints, accepted_R
    accept_drafts(step["verified"], step["rows"], *drawn, last=LAST, length=LENGTH)


def equal_state(mine: RowState, theirs: RowState) -> bool:
    names = ["ints", "floats", "pages"]
    pairs = [(getattr(mine, name), getattr(theirs, name)) for name in names]
    pairs += zip(mine.columns.values(), theirs.columns.values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("set_up", [verify.copy_rows, set_up_by_kernel])
@pytest.mark.parametrize("seed", range(6))
def test_a_draft_row_is_its_row_some_tokens_ahead(set_up, seed):
    case = Case(seed, adapters=seed % 2 == 0, made=seed > 1)
    expected, drafts_R = copy.deepcopy(case.state), case.drafts.drafts_R.clone()
    which = 0
    for row, mine in zip(case.rows, case.draft_rows, strict=True):
        for ahead, draft_row in enumerate(mine, 1):
            position = int(case.state.ints[row, LENGTH]) + ahead
            path = case.paths[which].tolist()
            token = path[min(max(position - case.verified[which][3], 0), len(path) - 1)]
            if case.verified[which][3] == IN_ROW_STATE:
                token = int(case.drafts.next_RG[row, ahead - 1])
            for state in (expected.ints, expected.floats, expected.pages, *expected.columns.values()):
                state[draft_row] = state[row]
            expected.ints[draft_row, LENGTH], expected.ints[draft_row, LAST] = position, token
            drafts_R[draft_row] = token
        which += bool(mine)
    set_up(case.state, case.drafts, case.step)
    assert equal_state(case.state, expected) and torch.equal(case.drafts.drafts_R, drafts_R)


@pytest.mark.parametrize("accept", [verify.continue_rows, accept_by_kernel])
@pytest.mark.parametrize("seed", range(8))
def test_drafts_up_to_the_first_wrong_one_are_accepted(accept, seed):
    case, rng = Case(seed, adapters=False), np.random.default_rng(seed)
    expected = copy.deepcopy(case.state)
    output = torch.randint(VOCAB, 2 * VOCAB, (4, len(case.step_rows) + 9), dtype=torch.int32)  # no draft
    accepted = torch.full((output.shape[1],), 77, dtype=torch.int32)
    expected_accepted, place = accepted.clone(), 0
    for row, mine in zip(case.rows, case.draft_rows, strict=True):
        right = int(rng.integers(0, len(mine) + 1))
        for i, draft_row in enumerate(mine):
            if i != right:  # those after a wrong one do not count
                output[0, place + i] = int(case.drafts.drafts_R[draft_row])
        if mine:
            expected.ints[row, LAST] = int(output[0, place + right])
            expected.ints[row, LENGTH] += right
            expected_accepted[place] = right
        place += 1 + len(mine)
    output, accepted = output.to(DEVICE), accepted.to(DEVICE)
    accept(case.state, case.drafts, case.step, output, accepted)
    assert equal_state(case.state, expected) and torch.equal(accepted.cpu(), expected_accepted)
