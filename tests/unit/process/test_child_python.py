"""Children look for imports where their parent does, and nowhere else."""

import subprocess
from pathlib import Path

from rollout.process.child_processes import import_path, module_command


def test_a_file_of_the_current_folder_hides_no_library_from_a_child(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('imported from the current folder')")
    done = subprocess.run(
        module_command("json.tool", "--help"), cwd=tmp_path, env=import_path(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_child_does_not_get_the_current_folder_as_a_place_of_imports() -> None:
    assert "" not in import_path()["PYTHONPATH"].split(":")
