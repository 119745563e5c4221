"""The rule that comments and docstrings name their things."""

from pathlib import Path

import pytest

from scripts.check.comments import problems


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1  # of its upload", 1),
        ("x = 1\n#: for threads", 2),
        ("# A sentence.\n\n# Of the step:", 3),
        ('def f():\n    """Of all ranks."""', 1),
        ('"""so it is"""', 1),
        ('def f():\n    """What a step keeps."""', 1),
        ("x = 1\n#: As config.json names it.", 2),
        ("x = 1  # the row's state, not that of its group", 1),
        ("x = 1\n# A page is copied with those\n# of its session.", 2),
        ('def f():\n    """A prompt of\n    which a part is known."""', 1),
        ("x = 1  # unmap the memory of before", 1),
        ('def f():\n    """Forget pages that have\n    what another page has."""', 1),
        ("x = 1  # pages when the pool gets short", 1),
        ('def f():\n    """Say what the pool has."""', 0),
        ("x = 1  # bytes of its upload", 0),
        ("x = 1  # the step, which of all reads most", 0),
        ("# This is a sentence that goes on\n# with its second line.", 0),
        ("# With two ranks, each has a half.", 0),
        ('x = "# of a string"', 0),
        ("x = 1  # by-products", 0),
        ('def f():\n    """Forward of all layers."""', 0),
    ],
)
def test_a_comment_that_leaves_a_noun_out_is_found(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout/module.py").write_text(f"{text}\n")
    found = problems(tmp_path)
    assert [each.split(": ")[0] for each in found] == ([f"rollout/module.py:{line}"] if line else [])
