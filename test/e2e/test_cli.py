"""The command line, as somebody uses it who knows docker: output, exit codes, and what is left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from platform_under_test import BIN, IMAGE, TOOLKIT, WORKSPACE, Platform, wait_for


@pytest.fixture
def detached(platform: Platform) -> Iterator[str]:
    """The id of a sandbox that stays until it is removed."""
    sandbox = platform.dsec("run", "-d", "-m", "128m", "--ttl", "10m", IMAGE).stdout.strip()
    yield sandbox
    platform.dsec("rm", sandbox, check=False)


def lines_of_json(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def listed(platform: Platform, *flags: str) -> list[str]:
    return platform.dsec("ps", "-q", *flags).stdout.split()


# ---- run


def test_run_prints_and_removes(platform: Platform) -> None:
    done = platform.dsec("run", "--rm", "-l", "test=run", IMAGE, "sh", "-c", "echo out; echo err >&2; exit 3", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    done = platform.dsec("run", "--rm", "-l", "test=run", IMAGE, "echo", "a b", "$HOME")
    assert (done.stdout, done.stderr) == ("a b $HOME\n", "")
    assert listed(platform, "-l", "test=run") == []


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ((IMAGE, "true"), 0, ""),
        ((IMAGE, "sh", "-c", "exit 255"), 255, ""),
        ((IMAGE, "sh", "-c", "exit 2"), 2, ""),
        ((IMAGE, "sh", "-c", "kill -TERM $$"), 143, ""),
        ((IMAGE, "no-such-program"), 127, "no-such-program"),
        ((IMAGE, "/etc/passwd"), 126, "/etc/passwd"),
        (("--timeout", "300ms", IMAGE, "sleep", "300"), 124, "time-out"),
        (("-m", "64m", IMAGE, "python3", "-c", "x = bytearray(200 << 20)"), 137, "memory"),
        (("no-such-image:1", "true"), 125, "no-such-image:1"),
        (("-m", "1m", IMAGE, "true"), 125, "memory"),
        (("-u", "no-such-user", IMAGE, "true"), 125, "no-such-user"),
        (("-w", "/no/such/dir", IMAGE, "true"), 125, "/no/such/dir"),
    ],
)
def test_run_exit_codes(platform: Platform, args: tuple[str, ...], code: int, says: str) -> None:
    done = platform.dsec("run", "--rm", "-l", "test=codes", *args, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    if says:
        assert done.stderr.startswith("dsec: ") and says in done.stderr
    else:
        assert done.stderr == ""
    assert listed(platform, "-l", "test=codes") == []


def test_no_platform_is_125(platform: Platform) -> None:
    env = {**platform.env, "DSEC_URL": "http://127.0.0.1:9", "DSEC_API_KEY": platform.key()}
    done = subprocess.run([str(BIN / "dsec"), "run", IMAGE, "true"], check=False, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 125
    assert "127.0.0.1:9" in done.stderr, done.stderr


def test_stdin_is_passed_when_asked(platform: Platform) -> None:
    data = os.urandom(1 << 20)
    done = platform.dsec("run", "--rm", "-i", IMAGE, "cat", input=data, text=False)
    assert done.stdout == data
    done = platform.dsec("run", "--rm", IMAGE, "cat", input=data, text=False)
    assert done.stdout == b""


def test_unknown_image_has_a_hint(platform: Platform) -> None:
    done = platform.dsec("run", "debian-pyhton:12", "true", check=False)
    assert done.returncode == 125
    assert "debian-pyhton:12" in done.stderr
    assert IMAGE in done.stderr or "dsec image" in done.stderr, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_nothing(platform: Platform, number: signal.Signals) -> None:
    label = f"test=interrupt-{number.name}"
    running = subprocess.Popen(
        [str(BIN / "dsec"), "run", "-l", label, IMAGE, "sh", "-c", "echo started; sleep 300"],
        env=platform.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert running.stdout is not None and running.stdout.readline() == b"started\n"
        [sandbox] = listed(platform, "-l", label)
        running.send_signal(number)
        _, err = running.communicate(timeout=60)
        assert (running.returncode, err) == (-number, b"")
        assert listed(platform, "-l", label) == []
        assert sandbox not in platform.ids_on_host()
    finally:
        running.kill()
        running.wait()


def test_interrupted_exec_leaves_the_sandbox(platform: Platform, detached: str) -> None:
    running = subprocess.Popen(
        [str(BIN / "dsec"), "exec", detached, "sh", "-c", "echo started; sleep 300"],
        env=platform.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert running.stdout is not None and running.stdout.readline() == b"started\n"
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
        assert running.returncode == -signal.SIGINT
    finally:
        running.kill()
        running.wait()
    left = "grep -lx sleep /proc/[0-9]*/comm | wc -l"
    wait_for("the command is gone", lambda: platform.dsec("exec", "--shell", left, detached).stdout.strip() == "0")


# ---- a sandbox that stays


def test_session(platform: Platform, tmp_path: Path) -> None:
    sandbox = platform.dsec("run", "-d", "--name", "cli-session", "-l", "test=session", IMAGE, "sh", "-c", "echo kept; echo bad >&2; exec sleep 300").stdout.strip()
    try:
        assert listed(platform, "-l", "test=session") == [sandbox]
        assert sandbox[:8] in platform.dsec("ps").stdout
        assert platform.dsec("exec", "cli-session", "hostname").stdout == sandbox + "\n"
        assert platform.dsec("exec", sandbox[:12], "sh", "-c", "exit 4", check=False).returncode == 4
        [shown] = json.loads(platform.dsec("inspect", sandbox).stdout)
        assert (shown["id"], shown["state"]) == (sandbox, "STATE_READY")

        first = next(c["commandId"] for c in lines_of_json(platform.dsec("logs", "--json", "--list", sandbox).stdout) if c.get("running"))
        logs = wait_for("its output", lambda: (d := platform.dsec("logs", sandbox, first)).stderr and d)
        assert (logs.stdout, logs.stderr) == ("kept\n", "bad\n")  # type: ignore[attr-defined]

        data = os.urandom(3 << 20)
        (tmp_path / "in").write_bytes(data)
        (tmp_path / "in").chmod(0o751)
        platform.dsec("cp", tmp_path / "in", f"{sandbox}:/tmp/there")
        assert platform.dsec("exec", sandbox, "stat", "-c", "%s %a", "/tmp/there").stdout == f"{3 << 20} 751\n"
        platform.dsec("cp", f"{sandbox}:/tmp/there", tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == data
        done = platform.dsec("cp", f"{sandbox}:/no/such/file", tmp_path / "none", check=False)
        assert done.returncode == 1 and "/no/such/file" in done.stderr
        assert not (tmp_path / "none").exists()

        assert platform.dsec("kill", sandbox, first).stdout.strip() == first
        assert platform.dsec("rm", sandbox).stdout.strip() == sandbox
        assert sandbox not in platform.ids_on_host()
        assert listed(platform, "-l", "test=session") == []
        assert listed(platform, "-a", "-l", "test=session") == [sandbox]  # remembered for a while
    finally:
        platform.dsec("rm", sandbox, check=False)


def test_detached_command(platform: Platform, detached: str) -> None:
    command = platform.dsec("exec", "-d", detached, "sh", "-c", "echo late; exit 3").stdout.strip()
    assert platform.dsec("logs", "-f", detached, command).stdout == "late\n"


def test_no_network(platform: Platform) -> None:
    done = platform.dsec("run", "--rm", "--network", "none", IMAGE, "sh", "-c", "cd /sys/class/net && echo *")
    assert done.stdout == "lo\n"


def test_rm_all_of_a_label(platform: Platform) -> None:
    made = {platform.dsec("run", "-d", "-m", "64m", "-l", "test=many", IMAGE).stdout.strip() for _ in range(3)}
    assert set(platform.dsec("rm", "-l", "test=many").stdout.split()) == made
    assert listed(platform, "-l", "test=many") == []


def test_unknown_sandbox(platform: Platform) -> None:
    for args in (("exec", "s-unknown", "true"), ("rm", "nobody"), ("inspect", "nobody"), ("logs", "nobody")):
        done = platform.dsec(*args, check=False)
        assert done.returncode in (1, 125) and args[1] in done.stderr, (args, done)


# ---- environments


@pytest.mark.parametrize("kind", ["image", "workspace", "toolkit"])
@pytest.mark.parametrize("source", ["--from-dir", "--from-tar"])
def test_environment(platform: Platform, tmp_path: Path, kind: str, source: str) -> None:
    tree, name = tmp_path / "tree", f"cli-{kind}:1"
    (tree / "cli").mkdir(parents=True)
    (tree / "cli" / "file").write_text("made by the test\n")
    (tree / "cli" / "link").symlink_to("file")
    if source == "--from-tar":
        with tarfile.open(tmp_path / "tree.tar.gz", "w:gz") as tar:
            tar.add(tree, arcname=".")
        tree = tmp_path / "tree.tar.gz"
    made = json.loads(platform.dsec(kind, "create", "--json", name, source, tree).stdout)
    try:
        assert name in platform.dsec(kind, "ls", "-q").stdout.split()
        assert name.split(":")[0] in platform.dsec(kind, "ls").stdout
        [shown] = json.loads(platform.dsec(kind, "inspect", name).stdout)
        digests = [e[key] for e in (made, shown) for key in e if "digest" in key.lower()]
        assert len(digests) >= 2 and len(set(digests)) == 1, (made, shown)
        if kind != "image":  # that image has no program to run
            done = platform.dsec("run", f"--{kind}", name, IMAGE, "cat", "/cli/link")
            assert done.stdout == "made by the test\n"
    finally:
        platform.dsec(kind, "rm", name)
    assert name not in platform.dsec(kind, "ls", "-q").stdout.split()
    done = platform.dsec(kind, "inspect", name, check=False)
    assert done.returncode == 1 and name in done.stderr


@pytest.mark.parametrize("content", [b"", b"this is no archive", b"\x1f\x8b\x08\0garbage", b"x" * 100000])
def test_bad_archive(platform: Platform, content: bytes) -> None:
    before = platform.dsec("image", "ls", "-q").stdout
    done = platform.dsec("image", "create", "bad:1", "--from-tar", "-", input=content, text=False, check=False)
    assert done.returncode == 1, done
    assert b"archive" in done.stderr or b"tar" in done.stderr or b"gzip" in done.stderr, done.stderr
    assert platform.dsec("image", "ls", "-q").stdout == before


# ---- JSON, diagnosis, usage


def test_json_everywhere(platform: Platform, detached: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    ref = {"image": IMAGE, "workspace": WORKSPACE, "toolkit": TOOLKIT}
    commands: list[tuple[object, ...]] = [
        ("run", "--json", IMAGE, "echo", "x"),
        ("exec", "--json", detached, "echo", "x"),
        ("ps", "--json"),
        ("inspect", "--json", detached, f"image/{IMAGE}"),
        ("logs", "--json", "--list", detached),
        ("logs", "--json", detached),
        ("cp", "--json", tmp_path / "f", f"{detached}:/tmp/f"),
        ("kill", "--json", detached),
        ("doctor", "--json"),
        ("version", "--json"),
        *((kind, "ls", "--json") for kind in ref),
        *((kind, "inspect", "--json", name) for kind, name in ref.items()),
        ("rm", "--json", detached),
    ]
    for command in commands:
        done = platform.dsec(*command)
        parsed = lines_of_json(done.stdout)
        assert parsed or command[0] == "kill", command
        assert all(isinstance(p, dict) for p in parsed), command


@pytest.mark.parametrize("args", [("exec", "--json", "nobody", "true"), ("run", "--json", "nothing:1", "true"), ("image", "inspect", "--json", "nothing:1")])
def test_errors_are_json_too(platform: Platform, args: tuple[str, ...]) -> None:
    done = platform.dsec(*args, check=False)
    assert done.returncode != 0 and done.stdout == ""
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "not_found" and error["message"], error


def test_doctor_and_version(platform: Platform) -> None:
    findings = lines_of_json(platform.dsec("doctor", "--json").stdout)
    assert findings and not [f for f in findings if f["verdict"] == "fail"]
    version = json.loads(platform.dsec("version", "--json").stdout)
    assert version["client"]["version"] and version["server"], version
    assert version["client"]["version"] in platform.dsec("version").stdout
    assert platform.dsec("--version").stdout == f"dsec {version['client']['version']}\n"


@pytest.mark.parametrize(("word", "hint"), [("images", "dsec image ls"), ("stop", "dsec rm"), ("pull", "dsec image create")])
def test_words_of_docker_have_a_hint(platform: Platform, word: str, hint: str) -> None:
    done = platform.dsec(word, check=False)
    assert (done.returncode, done.stdout) == (2, "") and hint in done.stderr, done


def test_rm_says_once_that_no_platform_answers(platform: Platform) -> None:
    env = {**platform.env, "DSEC_URL": "http://127.0.0.1:9", "DSEC_API_KEY": platform.key()}
    done = subprocess.run([BIN / "dsec", "rm", "a", "b"], check=False, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done


@pytest.mark.parametrize(
    "args",
    [
        ("no-such-command",), ("run",), ("run", "--no-such-flag", IMAGE), ("run", "-m", "much", IMAGE), ("run", "--timeout", "-1s", IMAGE, "true"),
        ("run", "-t", IMAGE), ("run", "--rm", "-d", IMAGE), ("run", "-i", IMAGE), ("run", IMAGE), ("run", "--rm", IMAGE),
        ("run", "-d", "--timeout", "1s", IMAGE), ("exec",), ("exec", "s"), ("rm",), ("cp", "a", "b"), ("inspect",),
        ("image", "create", "x:1"), ("image", "create"), ("image", "no-such"), ("kill",), ("logs",), ("ps", "extra"),
    ],
)  # fmt: skip
def test_usage_error(platform: Platform, args: tuple[str, ...]) -> None:
    done = platform.dsec(*args, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("dsec: ")
