"""The check of counting completions: it accepts what follows the rule and nothing else."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout.demo.counting import Counter, CountingError, check_completion, parse_prompt

TEXTS = ["<pad>", "<eos>", "<unk>", *"0123456789", " ", ":", "\n"]
STEPS = {0: 1, 1: 2, 2: 1, 3: 2}


def ids(text):
    return [TEXTS.index(character) for character in text]


def check(prompt, text, versions, steps=STEPS):
    return check_completion(prompt, ids(text), versions, steps, TEXTS.__getitem__)


def counted(prompt, versions):
    """What a right worker writes, by an independent formulation: whole numbers, cut where the version changes."""
    versions_of_tokens = [version for version, count in versions for _ in range(count)]
    last, text = parse_prompt(prompt), ""
    while len(text) < len(versions_of_tokens):
        number = " "
        for step in (STEPS[version] for version in versions_of_tokens[len(text) + 1 :]):
            wanted, other = f" {last + step}", f" {last + 3 - step}"
            goal = wanted if wanted.startswith(number) else other
            if number == goal:
                break
            number = goal[: len(number) + 1]
        text += number
        last = int(number) if number.strip() else last
    return text[: len(versions_of_tokens)]


def test_ones_and_twos_are_accepted():
    report = check("17:", " 18 19 20 2", [[0, 11]])
    assert (report.tokens, report.numbers, report.last, report.unfinished) == (11, 3, 20, "2")
    assert report.boundaries == ()
    assert check("97:", " 99 101 103", [[1, 11]]).last == 101


def test_a_prompt_may_hold_earlier_numbers():
    assert check("15 16 17:", " 18 1", [[0, 5]]).last == 18


@pytest.mark.parametrize("prompt", ["17", "17: ", "x:", ":", "017:", "17: 18", "16  17:", ""])
def test_a_prompt_that_does_not_count_is_refused(prompt):
    with pytest.raises(ValueError, match="counting prompt"):
        check(prompt, " 18", [[0, 3]])


def test_an_empty_completion_is_right():
    report = check("17:", "", [])
    assert (report.tokens, report.numbers, report.last, report.unfinished) == (0, 0, 17, "")


def test_numpy_tokens_are_accepted():
    tokens = np.array(ids(" 18 19"), dtype=np.int32)
    assert check_completion("17:", tokens, [[0, 6]], STEPS, TEXTS.__getitem__).last == 18


@pytest.mark.parametrize(
    ("text", "versions", "begun"),
    [
        (" 18 19 21 23 ", [[0, 6], [1, 7]], "19"),  # 19 is complete: a space, then twos
        (" 18 20 22 ", [[0, 4], [1, 6]], ""),  # only the space is written
        (" 18 19 21 ", [[0, 5], [1, 5]], "1"),  # 1 cannot become 20: 19 is completed
    ],
)
def test_a_number_that_was_begun_ends_as_the_rule_says(text, versions, begun):
    report = check("17:", text, versions)
    (boundary,) = report.boundaries
    assert (boundary.position, boundary.version, boundary.step) == (versions[0][1], 1, 2)
    assert (boundary.last, boundary.begun) == (18, begun)


def test_a_begun_number_that_fits_both_steps_takes_the_new_step():
    assert check("9:", " 11 13", [[0, 2], [1, 4]]).last == 11
    assert check("9:", " 10 11", [[1, 2], [2, 4]]).last == 10


def test_a_begun_number_that_changed_length_is_completed():
    assert check("98:", " 100 101 ", [[1, 2], [2, 7]]).last == 101
    assert check("98:", " 99 101 ", [[0, 2], [1, 6]]).last == 101
    assert check("8:", " 9 11 ", [[0, 2], [1, 4]]).last == 11


def test_several_swaps_are_followed():
    versions = [[0, 37], [1, 1], [2, 44], [3, 50]]
    report = check("96:", counted("96:", versions), versions)
    assert [boundary.position for boundary in report.boundaries] == [37, 38, 82]


def test_every_swap_position_is_followed_as_an_independent_writer_does():
    for start in ("7:", "88:", "995:", "9993:"):
        for position in range(1, 60):
            for first in (0, 1):
                versions = [[first, position], [first + 1, 60 - position]]
                check(start, counted(start, versions), versions)


def test_every_single_wrong_token_is_found_where_it_is():
    versions = [[0, 31], [1, 30], [2, 29]]
    right = ids(counted("95:", versions))
    for position, token in enumerate(right):
        for wrong in range(len(TEXTS)):
            if wrong == token:
                continue
            tokens = [*right[:position], wrong, *right[position + 1 :]]
            with pytest.raises(CountingError) as caught:
                check_completion("95:", tokens, versions, STEPS, TEXTS.__getitem__)
            assert caught.value.position == position
            assert (caught.value.expected, caught.value.found) == (TEXTS[token], TEXTS[wrong])


def test_a_lost_or_doubled_token_is_found():
    versions = [[0, 60], [1, 60]]
    right = ids(counted("95:", versions))
    for position in range(len(right) - 1):
        lost = right[:position] + right[position + 1 :]
        doubled = right[: position + 1] + right[position:-1]
        for tokens, count in ((lost, 59), (doubled, 60)):
            with pytest.raises(CountingError):
                check_completion("95:", tokens, [[0, 60], [1, count]], STEPS, TEXTS.__getitem__)


def test_a_boundary_that_is_off_by_one_is_found_wherever_the_steps_disagree():
    found = hidden = 0
    for position in range(2, 90):
        versions = [[0, position], [1, 100 - position]]
        text = counted("8:", versions)
        counter = Counter(8)
        for character in text[:position]:
            counter.push(character)
        later = [[0, position + 1], [1, 99 - position]]
        if counter.expected(1) == counter.expected(2):  # both models write this token
            check("8:", text, later)
            hidden += 1
        else:
            with pytest.raises(CountingError) as caught:
                check("8:", text, later)
            assert caught.value.position == position
            found += 1
    assert found > 20 and hidden > 20


@pytest.mark.parametrize(
    ("versions", "position"),
    [
        ([[0, 5]], 5),
        ([[0, 7]], 7),
        ([], 0),
        ([[0, 3], [9, 3]], 3),
        ([[1, 3], [0, 3]], 3),
        ([[0, 3], [1, 0], [1, 3]], 3),
        ([[0, 7], [1, -1]], 7),
    ],
)
def test_version_runs_that_are_no_account_of_the_tokens_are_found(versions, position):
    with pytest.raises(CountingError, match="version runs") as caught:
        check("17:", " 18 19", versions)
    assert caught.value.position == position


def test_a_step_that_no_model_has_is_refused():
    with pytest.raises(ValueError, match="1 or 2"):
        check("17:", " 20", [[0, 3]], steps={0: 3})


def test_the_check_needs_no_torch():
    code = "import sys, rollout.demo.counting; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
