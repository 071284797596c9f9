"""examples/demo.py as a user runs it: it compares every sandbox with a run on this host, and says what differs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from platform_under_test import ROOT, Platform


# Each sandbox of the burst runs the project's tests twice, at more than a second of processor time a run.
@pytest.mark.limit(3000)
@pytest.mark.parametrize("count", [0, 50, pytest.param(200, marks=pytest.mark.long)])
def test_demo(platform: Platform, count: int) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/demo.py"), "--count", str(count)],
        check=False, env=platform.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240 + 12 * count,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "'hello world', exit code 0" in done.stdout, said
    assert re.search(r"pypi\.org (answers|does not answer: .*); registry\.npmjs\.org does not answer: ", done.stdout), said
    if count:
        assert re.search(rf"\b{count}/{count} done in .*; 0 differ from the local run", done.stdout), said
        passed = re.search(r"^  (\d+) passed", done.stdout, re.MULTILINE)
        assert passed and int(passed[1]) >= 200, said  # a real project: not an empty selection of tests
    assert platform.dsec("ps", "-q").stdout == ""
