"""The rule that a comment is a sentence or a noun phrase."""

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
        ("x = 1  # bytes of its upload", 0),
        ("# This is a sentence that goes on\n# with its second line.", 0),
        ("# With two ranks, each has a half.", 0),
        ('x = "# of a string"', 0),
        ("x = 1  # by-products", 0),
        ('def f():\n    """Forward of all layers."""', 0),
    ],
)
def test_half_a_sentence_is_found(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout/module.py").write_text(f"{text}\n")
    found = problems(tmp_path)
    assert [each.split(": ")[0] for each in found] == ([f"rollout/module.py:{line}"] if line else [])
