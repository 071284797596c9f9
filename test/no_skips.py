"""A plugin of pytest: in CI a skipped test fails the run, unless test/skips.txt names it, or its file, with a reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("skips.txt")


def allowed() -> set[str]:
    """Files and tests, from the root of the repository. Lines of Go begin with a package, and match nothing here."""
    lines = [line.partition(" # ") for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return {what.strip() for what, _, reason in lines if reason.strip()}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    listed = allowed()
    surprises = []
    for report in reporter.getreports("skipped"):
        file, _, test = report.nodeid.partition("::")
        name = str((session.config.rootpath / file).relative_to(LIST.parent.parent))
        if not hasattr(report, "wasxfail") and not {name, f"{name}::{test}"} & listed:
            surprises.append(report.nodeid)
    for nodeid in surprises:
        reporter.write_line(f"\nSKIP not on the list: {nodeid} (a skip is a claim: list it in test/skips.txt with its reason)", red=True)
    if surprises and os.environ.get("CI"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
