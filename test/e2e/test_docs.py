"""What the documentation shows is run against a real platform, and prints what the documentation says.

Pages of libdsec: blocks of ```python are run in their order as one program whose top level may `await`, with `client` and a
fresh `sandbox` given. A block with `asyncio.run(`, or of libdsec.sync, is a program of its own and run by the interpreter.
The command line's pages: the blocks of ```sh of a page are one script of bash, which ends at the first command that fails.
Blocks in other languages (```console: what needs a terminal) are only shown.

`# -> TEXT` after a line says what that block prints, in this order; `...` in it stands for anything within a line.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from platform_under_test import BIN, IMAGE, ROOT, Platform

from libdsec import DSecContainerRunArgs

GUIDE = ROOT / "sdk/python/docs"
PAGES = [*sorted(GUIDE.glob("*.md")), ROOT / "README.md", ROOT / "sdk/python/README.md"]
SHELL_PAGES = [ROOT / "docs/cli.md"]
PROMISE = re.compile(r"# -> (.*)$", re.MULTILINE)


@dataclass
class Block:
    """A fenced block; line is that of its first line in its page."""

    page: Path
    line: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_program(self) -> bool:
        return "asyncio.run(" in self.text or "libdsec.sync" in self.text

    def check(self, printed: str) -> None:
        """What is promised was printed, in this order."""
        lines = iter(printed.splitlines())
        for promise in PROMISE.findall(self.text):
            form = ".*".join(map(re.escape, promise.rstrip().split("...")))
            assert any(re.fullmatch(form, line.rstrip()) for line in lines), f"{self.where}: not printed: {promise}\nall of it:\n{printed}"


def blocks(page: Path, language: str) -> list[Block]:
    found = re.finditer(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    made = [Block(page, m.string.count("\n", 0, m.start()) + 2, m[1]) for m in found]
    assert made, f"{page} shows nothing that could be run"
    return made


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


async def run(block: Block, names: dict[str, Any]) -> str:
    """Run a block in the page's own names. Its lines have the page's numbers."""
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(code, CodeType)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await asyncio.wait_for(result, 120)
    return printed.getvalue()


def run_program(block: Block, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.text],
        check=False, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, f"{block.where}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def here(platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    """Examples work in a directory of their own, and leave no sandbox."""
    monkeypatch.chdir(tmp_path)
    for variable in ("DSEC_CONFIG", "DSEC_URL", "DSEC_API_KEY", "DSEC_CONTEXT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("DSEC_CONFIG", str(platform.config))
    yield platform
    left = platform.dsec("ps", "-q").stdout.split()
    if left:
        platform.dsec("rm", *left, check=False)
    assert not left, "the page's examples leave sandboxes"


@pytest.mark.parametrize("page", PAGES, ids=name)
async def test_python(page: Path, here: Platform) -> None:
    async with here.client() as client:
        args = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=512, ttl_running_stop=300)
        async with await client.run_container(args) as sandbox:
            names: dict[str, Any] = {"__name__": "__main__", "client": client, "sandbox": sandbox}
            for block in blocks(page, "python"):
                try:
                    printed = await asyncio.to_thread(run_program, block, here.env) if block.is_program else await run(block, names)
                except Exception as e:
                    e.add_note(f"in the block at {block.where}")
                    raise
                block.check(printed)


@pytest.mark.parametrize("page", SHELL_PAGES, ids=name)
def test_command_line(page: Path, here: Platform, tmp_path: Path) -> None:
    """Between two blocks the script prints a line of its own, so that each block's output is known."""
    shown = blocks(page, "sh")
    cut = "----- the next block -----"
    script = ["set -eu -o pipefail"]
    for block in shown:
        script += [""] * (block.line - len(script) - 2) + [f"echo '{cut}'"] + block.text.splitlines()
    assert all(script[b.line - 1] == b.text.splitlines()[0] for b in shown), "the script's lines have the page's numbers"
    file = tmp_path / "script.sh"
    file.write_text("\n".join(script) + "\n")
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        ["bash", str(file)],
        check=False, cwd=tmp_path / "here", env={**here.env, "PATH": f"{BIN}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, f"{page}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    printed = done.stdout.split(cut + "\n")[1:]
    assert len(printed) == len(shown)
    for block, output in zip(shown, printed, strict=True):
        block.check(output)
    for command in re.findall(r"^  ([a-z-]+)  ", here.dsec("help").stdout, re.MULTILINE):
        assert f"dsec {command}" in page.read_text(), f"{page} does not tell of dsec {command}"


def test_pages_are_linked() -> None:
    """Each page of the guide is in its table of contents, and no link of the documentation leads nowhere."""
    contents = (GUIDE / "README.md").read_text()
    for page in GUIDE.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in contents, f"{page.name} is not in the table of contents"
    for page in [*PAGES, *SHELL_PAGES, *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page}: {target}"


def test_named_protections_are_tested() -> None:
    """Each test that SECURITY.md names exists: `test_x.py::test_y`, `::test_z` of the same file, `package: TestX, TestY`."""
    python: dict[str, str] = {}
    for file in [*ROOT.glob("test/**/test_*.py"), *ROOT.glob("sdk/python/tests/**/test_*.py")]:
        python[file.name] = python.get(file.name, "") + file.read_text()
    go: dict[str, str] = {}
    for file in ROOT.glob("**/*_test.go"):
        go[str(file.parent)] = go.get(str(file.parent), "") + file.read_text()
    named = 0
    for line in (ROOT / "SECURITY.md").read_text().splitlines():
        last = ""
        for quoted in re.findall(r"`([^`]+)`", line):
            if found := re.fullmatch(r"(?:sdk: )?(test_\w+\.py)?::(test_\w+)", quoted):
                last = found[1] or last
                assert re.search(rf"^(async )?def {found[2]}\(", python[last], re.MULTILINE), quoted
                named += 1
            elif found := re.fullmatch(r"([\w/]+): ((?:(?:Test|Fuzz)\w+(?:, )?)+)", quoted):
                text = "".join(text for path, text in go.items() if path.endswith(f"/{found[1]}"))
                for test in found[2].split(", "):
                    assert re.search(rf"^func {test}\([tf] ", text, re.MULTILINE), f"{found[1]}: {test}"
                    named += 1
    assert named > 100


def test_a_promise_that_is_not_kept_is_noticed() -> None:
    block = Block(GUIDE / "README.md", 1, "print(1)  # -> 1\nprint('a b c')  # -> a ... c\n")
    block.check("x\n1\na b c\n")
    for printed in ("", "1\n", "a b c\n1\n", "1\na b\n", "11\na b c\n"):
        with pytest.raises(AssertionError):
            block.check(printed)
