"""What is published: a wheel and an sdist, complete, typed, and usable without this tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
from libdsec import CommandResult, DSecClient, DSecContainerRunArgs
from libdsec import sync


async def main() -> int:
    async with DSecClient() as client:
        sandbox = await client.run_container(DSecContainerRunArgs(container_image="x"))
        result: CommandResult = await sandbox.run_shell("true")
        return result.exit_code


def plain() -> int:
    with sync.DSecClient() as client:
        return client.run_container(DSecContainerRunArgs(container_image="x")).run_shell("true").exit_code
"""


def run(*argv: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(a) for a in argv], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both from a copy, as a publisher would from a checkout; what the build leaves behind stays in it."""
    tree = tmp_path_factory.mktemp("tree") / "libdsec"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist", ".*_cache"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tree / "dist", tree, cwd=tree)
    return tree / "dist"


def modules() -> set[str]:
    return {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "libdsec").rglob("*.py")}


def test_wheel_is_complete(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as z:
        names = {n for n in z.namelist() if ".dist-info/" not in n}
    assert names == modules() | {"libdsec/py.typed"}


def test_sdist_makes_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as t:
        t.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "again", tree, cwd=tmp_path)
    (first,), (second,) = built.glob("*.whl"), (tmp_path / "again").glob("*.whl")
    with zipfile.ZipFile(first) as a, zipfile.ZipFile(second) as b:
        assert {n: a.read(n) for n in a.namelist()} == {n: b.read(n) for n in b.namelist()}


def test_installed_wheel_works_and_is_typed(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as z:
        z.extractall(site)  # what pip does with a wheel without scripts
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    where = f"import sys; sys.path.insert(0, {str(site)!r}); import libdsec, program; print(libdsec.__file__)"
    out = run(sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {where}", cwd=tmp_path)
    assert out.strip() == str(site / "libdsec" / "__init__.py")
    config = tmp_path / "mypy.ini"
    config.write_text(f"[mypy]\nstrict = true\nmypy_path = {site}\ncache_dir = {tmp_path}/cache\n")
    run(sys.executable, "-m", "mypy", "--config-file", config, program, cwd=tmp_path)
