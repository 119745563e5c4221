"""The page of the files that one prompt runs through: it is short, and a worker that is asked shows no other file."""

import pytest

from scripts.check.request_path import files_of_a_prompt
from scripts.request_page import listed_files

#: Only less: each file of the path is one more to open for who follows a request.
MOST_FILES = 79
#: Files that also run beside the requests, now and then.
BESIDE = ("rollout/metrics/", "rollout/service/", "rollout/ranks/")


def test_a_prompt_runs_through_few_files() -> None:
    listed = listed_files()
    assert 50 < len(listed) <= MOST_FILES and len(set(listed)) == len(listed)


@pytest.mark.nightly
def test_the_page_lists_the_files_of_a_prompt() -> None:
    _, served = files_of_a_prompt()
    other = set(served) ^ set(listed_files())
    assert not [file for file in other if not file.startswith(BESIDE)]
