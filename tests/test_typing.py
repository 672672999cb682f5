"""The public names as type checkers see them: right use passes, each wrong line is an error and nothing else is.

Both checkers come from PyPI alone (basedpyright is pyright with its Node.js in a wheel). ``typing/`` is never run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "typing"
RIGHT, WRONG = FOLDER / "api.py", FOLDER / "wrong.py"


def mypy(_: Path) -> set[tuple[str, int]]:
    command = [sys.executable, "-m", "mypy", "--strict", RIGHT, WRONG]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {(Path(m[1]).name, int(m[2])) for m in re.finditer(r"^(.+\.py):(\d+): error:", done.stdout, re.MULTILINE)}


def pyright(tmp_path: Path) -> set[tuple[str, int]]:
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps({"include": [str(RIGHT), str(WRONG)], "typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error", "--project", str(project)]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    said = json.loads(done.stdout)["generalDiagnostics"]
    return {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in said if one["severity"] == "error"}


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_right_use_passes_and_each_wrong_line_is_an_error(checker, tmp_path):
    lines = WRONG.read_text().splitlines()
    marked = {(WRONG.name, number) for number, line in enumerate(lines, 1) if "# wrong: " in line}
    assert len(marked) == 14
    assert checker(tmp_path) == marked
