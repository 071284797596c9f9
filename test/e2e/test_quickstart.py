"""`make quickstart` and `make stop`, without the building: twice, and what is left in the end."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from platform_under_test import BIN, IMAGE, ROOT, TOOLKIT, WORKSPACE, Platform, wait_for


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Platform]:
    """A platform that the scripts start: a program in front of dsec moves it to directories and a port of the test's own."""
    p = Platform()
    where = f"--data-dir {p.data} --run-dir {p.run}"
    (tmp_path / "dsec").write_text(
        f"""#!/bin/sh
case $1 in
up) shift; exec {BIN}/dsec up {where} --listen 127.0.0.1:{p.port} --pool-size 8g "$@" ;;
down) shift; exec {BIN}/dsec down {where} "$@" ;;
esac
exec {BIN}/dsec "$@"
"""
    )
    (tmp_path / "dsec").chmod(0o755)
    p.env |= {"DSEC_BIN": str(tmp_path), "N": "4"}
    passed = ROOT / "build/demo-passed"
    if passed.exists():
        shutil.copy(passed, tmp_path / "passed")
    passed.unlink(missing_ok=True)
    try:
        yield p
    finally:
        if (tmp_path / "passed").exists():
            shutil.copy(tmp_path / "passed", passed)
        else:
            passed.unlink(missing_ok=True)
        p.stop()


def script(p: Platform, name: str) -> str:
    done = subprocess.run([ROOT / "scripts" / name], check=False, env=p.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quickstart_twice_and_stop(here: Platform) -> None:
    said = script(here, "quickstart.sh")
    pid = here.state()["pid"]
    assert "'hello world', exit code 0" in said, said
    assert "4/4 done" in said and "0 differ from the local run" in said, said
    assert here.url in here.dsec("doctor").stdout
    context = json.loads(here.config.read_text())["contexts"]["local"]
    assert context["url"] == here.url and context["api_key"].startswith("dsec_")
    trees = {f.name: f.stat().st_mtime_ns for f in (ROOT / "build").glob("*.tar")}
    digests = here.dsec("inspect", f"image/{IMAGE}", f"workspace/{WORKSPACE}", f"toolkit/{TOOLKIT}").stdout

    # The three commands that it says to try are ones that work.
    tries = [line.strip().removeprefix("bin/dsec ") for line in said.splitlines() if line.startswith("  bin/dsec ")]
    assert len(tries) == 3, said
    for line in tries:
        done = subprocess.run(f"{BIN}/dsec {line}", shell=True, check=False, env=here.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout, (line, done)

    again = script(here, "quickstart.sh")
    assert "'hello world', exit code 0" in again, again
    assert not [word for word in ("building", "fetching", "importing", "done in") if word in again], again
    assert here.state()["pid"] == pid  # the platform went on
    assert {f.name: f.stat().st_mtime_ns for f in (ROOT / "build").glob("*.tar")} == trees
    assert here.dsec("inspect", f"image/{IMAGE}", f"workspace/{WORKSPACE}", f"toolkit/{TOOLKIT}").stdout == digests

    script(here, "stop.sh")
    wait_for("the daemon has ended", lambda: not Path(f"/proc/{pid}").exists())
    assert not here.data.exists() and not here.run.exists()
    assert json.loads(here.config.read_text())["contexts"] == {}
    here.assert_host_as_before()
    script(here, "stop.sh")  # once more is no error
