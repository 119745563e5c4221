"""What n-grams of a text expect, by a loop; and engines whose drafts are compared with that."""

from collections.abc import Mapping, Sequence

import pytest
from rollout_kernels.step.ngrams import MOST_EQUAL

from rollout.engine.features.drafts.ngram_drafter import NgramDrafter
from rollout.engine.step.row_state import LENGTH, PROMPT, SEED
from tests.support.engine.harness import Bench


def followed(text: Sequence[int], count: int) -> list[int]:
    """The `count` tokens after the newest of the places that most equal tokens are before; else the last token."""
    best, found = 0, None
    for place in range(1, len(text)):
        equal = 0
        while equal < min(MOST_EQUAL, place) and text[place - 1 - equal] == text[-1 - equal]:
            equal += 1
        if equal and equal >= best:
            best, found = equal, place
    if found is None:
        return [text[-1]] * count
    path = list(text[found:])
    return (path * count)[:count]


def texts_of(plain: Bench, prompts: Mapping[str, Sequence[int]]) -> dict[int, list[int]]:
    """The texts of all completions of a run without drafts, by the seed of their row."""
    found = plain.completions.items()
    return {completion.seed: [*prompts[name], *completion.token_ids] for (name, _), completion in found}


class CheckedDrafts:
    """Compares all drafts of an engine with those of the loop over the whole text, which a plain run has made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, texts: Mapping[int, Sequence[int]]) -> None:
        self.texts = texts
        self.count = 0
        self.wrong: list[tuple[int, int]] = []  # seeds of rows, and tokens in their pages
        run = NgramDrafter.run

        def check(drafts, *how):
            rows_R = run(drafts, *how)
            for row in [] if rows_R is None else rows_R.tolist():
                ints = drafts.rows.ints[row].tolist()
                if row and ints[SEED] in self.texts and ints[PROMPT]:
                    text = self.texts[ints[SEED]][: ints[LENGTH] + 1]
                    self.count += 1
                    if drafts.next_RG[row].tolist() != followed(text, drafts.most):
                        self.wrong.append((ints[SEED], ints[LENGTH]))
            return rows_R

        monkeypatch.setattr(NgramDrafter, "run", check)
