"""Parsers, configuration and arguments, without a server."""

from __future__ import annotations

import json
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import libdsec
import libdsec.sync
from libdsec import (
    AuthenticationError,
    CommandFailedError,
    DSecConfig,
    DSecContainerRunArgs,
    DSecError,
    DSecTimeoutError,
    FailedPreconditionError,
    FileChange,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from libdsec._config import Endpoint
from libdsec._errors import error_from_code
from libdsec._files import path_field, path_fields
from libdsec._http1 import ChunkedDecoder, ProtocolError, parse_head
from libdsec._models import CommandResult, SandboxInfo, command_result, parse_time
from libdsec._retry import Backoff
from libdsec._wire import EnvelopeDecoder, decode, encode, envelope

ROOT = Path(__file__).resolve().parent.parent


def test_the_synchronous_client_is_what_would_be_generated() -> None:
    script = ROOT / "scripts" / "unasync.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for file in (ROOT / "src/libdsec/_sync").glob("*.py"):
        assert not re.search(r"\b(await|async|asyncio)\b", file.read_text()), file


def test_both_clients_have_the_same_names() -> None:
    assert libdsec.sync.__all__ == libdsec.__all__
    for name in libdsec.sync.__all__:
        theirs, ours = getattr(libdsec, name), getattr(libdsec.sync, name)
        if isinstance(theirs, type):
            members = {
                "aclose": "close",
                "__aiter__": "__iter__",
                "__anext__": "__next__",
                "__aenter__": "__enter__",
                "__aexit__": "__exit__",
            }
            assert {members.get(m, m) for m in vars(theirs)} == set(vars(ours)), name


def test_every_module_can_be_imported_without_dependencies() -> None:
    code = "import sys, libdsec, libdsec.sync; print([m for m in sys.modules if 'site-packages' in "
    code += "str(getattr(sys.modules[m], '__file__', ''))])"
    out = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert out.stdout == "[]\n", out.stderr


# Configuration.


def write(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


LOCAL = {"current": "local", "contexts": {"local": {"url": "http://h:1", "api_key": "k1"}, "x": {"url": "http://x"}}}


CASES = json.loads((ROOT.parents[1] / "internal/config/testdata/cases.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_which_platform(tmp_path: Path, case: dict[str, Any]) -> None:
    """The cases of the command line; the file says what its fields mean."""
    files = dict(case.get("files", {}))
    env = dict(case["env"])
    if not files:
        env["DSEC_CONFIG"] = "$DIR/config.json"
    if "file" in case:
        files["config.json"] = case["file"]
    for name, content in files.items():
        write(tmp_path / name, content)
    environ = {k: v.replace("$DIR", str(tmp_path)) for k, v in env.items()}
    assert set(case) <= {"name", "file", "files", "env", "context", "want", "error"}
    if "error" in case:
        with pytest.raises(DSecError) as caught:
            DSecConfig.load(context=case.get("context"), environ=environ)
        assert caught.value.reason == case["error"]
        assert "secret" not in str(caught.value)
    else:
        found = DSecConfig.load(context=case.get("context"), environ=environ)
        assert (found.url.rstrip("/"), found.api_key) == (case["want"]["url"].rstrip("/"), case["want"]["api_key"])


def test_arguments_come_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(CASES) > 30
    write(tmp_path / ".config/dsec/config.json", LOCAL)
    assert DSecConfig.load() == DSecConfig("http://h:1", "k1")
    assert DSecConfig.load("http://h:1") == DSecConfig("http://h:1", "k1")
    with pytest.raises(AuthenticationError, match="no key for it"):
        DSecConfig.load("http://elsewhere")
    assert DSecConfig.load("http://elsewhere", "k3") == DSecConfig("http://elsewhere", "k3")
    assert DSecConfig.load(api_key="k3") == DSecConfig("http://h:1", "k3")
    monkeypatch.setenv("DSEC_URL", "http://env")
    monkeypatch.setenv("DSEC_API_KEY", "k2")
    assert DSecConfig.load("http://a", "k3") == DSecConfig("http://a", "k3")
    assert DSecConfig.load(api_key="k3") == DSecConfig("http://env", "k3")
    assert DSecConfig.load(context="local") == DSecConfig("http://h:1", "k1")
    with pytest.raises(InvalidArgumentError, match="not both"):
        DSecConfig.load("http://a", context="local")
    with pytest.raises(FailedPreconditionError, match="HOME") as caught:
        DSecConfig.load(environ={})
    assert caught.value.reason == "no_config_path"
    with pytest.raises(FailedPreconditionError) as caught:
        DSecConfig.load(environ={"DSEC_CONFIG": str(tmp_path)})
    assert caught.value.reason == "unreadable_config"


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "5",
        "[" * 100_000,
        {"current": "y", "contexts": {}},
        {"current": 5, "contexts": {}},
        {"contexts": {"y": 5}},
        {"contexts": {"y": {"url": 5}}},
        {"contexts": {"y": {"url": "http://h", "api_key": "a b"}}},
        {"contexts": {"y": {"url": "http://u:secret@h"}}},
    ],
)
def test_a_bad_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: object) -> None:
    monkeypatch.setenv("DSEC_CONFIG", str(write(tmp_path / "c.json", bad)))
    with pytest.raises(InvalidArgumentError, match=r"c\.json") as caught:
        libdsec.DSecClient()
    assert caught.value.reason == "bad_config"
    assert "secret" not in str(caught.value)


def test_keys_and_numbers_are_checked() -> None:
    for key in ("a\nb", "a b", "", "ü", "x" * 1000):
        with pytest.raises(AuthenticationError) as caught:
            DSecConfig(api_key=key)
        assert not key or key not in str(caught.value)
    assert "secret" not in repr(DSecConfig(api_key="secret"))
    for name in ("retry_seconds", "request_timeout"):
        with pytest.raises(InvalidArgumentError):
            DSecConfig(**{name: 0})  # type: ignore[arg-type]
    assert DSecConfig().connection_bound() >= 16


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", ("h", 80, False, None, "h", "")),
        ("https://h:8/p/", ("h", 8, True, None, "h:8", "/p")),
        ("http://[::1]:7", ("::1", 7, False, None, "[::1]:7", "")),
        ("unix:///a%20b", ("", 0, False, "/a b", "localhost", "")),
    ],
)
def test_urls(url: str, expected: tuple[object, ...]) -> None:
    e = Endpoint.parse(url)
    assert (e.host, e.port, e.tls, e.unix_path, e.authority, e.prefix) == expected


@pytest.mark.parametrize(
    "url",
    ["", "h", "ftp://h", "http://", "http://u:p@h", "http://h:x", "unix://a/b", "unix://", "http://h/\r\nX: y", "http://h\t"],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        Endpoint.parse(url.replace("\t", "\x01"))


# Arguments.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            (f, v)
            for f in ("ttl_running_stop", "lifetime", "cpu_cores_limit")
            for v in (0, -1, "5", True, float("nan"), float("inf"))
        ],
        *[(f, v) for f in ("memory_limit_mb", "pids_limit", "disk_limit_mb") for v in (0, -1, 1.5, "5", True, 1 << 60)],
        *[("container_image", v) for v in ("", None, 5)],
        *[(f, v) for f in ("workspace", "init_user", "name", "hostname") for v in ("", 5, "a\0")],
        ("workdir", "relative"),
        ("toolkits", "one"),
        ("toolkits", [""]),
        ("toolkits", [5]),
        ("env", {"A": 5}),
        ("env", [("A", "b")]),
        ("labels", {5: "a"}),
        ("network_rules", {"pypi": 1}),
        ("network_rules", ["pypi"]),
    ],
)
def test_arguments_are_checked_early(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        DSecContainerRunArgs(**{"container_image": "x", field: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, InvalidArgumentError)
    args = DSecContainerRunArgs("x")
    setattr(args, field, value)
    with pytest.raises(InvalidArgumentError):
        args.to_spec()


def test_arguments_become_a_spec() -> None:
    args = DSecContainerRunArgs(
        "b:1", "w", ["t1", "t2"], 16, 0.5, 100, 1, 1.2, 60, {"npm": False}, "1:2", "/w", {"A": "b"}, {"l": "v"}, "n", "h"
    )
    assert args.to_spec() == {
        "image": "b:1",
        "workspace": "w",
        "toolkits": ["t1", "t2"],
        "limits": {"memoryBytes": str(16 << 20), "cpuCores": 0.5, "pids": "100", "diskBytes": str(1 << 20)},
        "idleTimeoutSeconds": "2",
        "lifetimeSeconds": "60",
        "networkRules": {"npm": False},
        "user": "1:2",
        "workdir": "/w",
        "env": {"A": "b"},
        "labels": {"l": "v"},
        "name": "n",
        "hostname": "h",
    }
    assert DSecContainerRunArgs("b").to_spec() == {"image": "b"}


# Errors.


def test_the_tree_of_errors() -> None:
    assert isinstance(error_from_code("invalid_argument", "m"), ValueError)
    assert isinstance(error_from_code("deadline_exceeded", "m"), TimeoutError)
    assert isinstance(error_from_code("unavailable", "m"), ConnectionError)
    assert type(error_from_code("from_the_future", "m")) is InternalError
    error = NotFoundError("what, why", reason="r", facts={"a": "b"}, sandbox_id="s1")
    error.index = 3
    assert str(error) == "what, why [not_found: r]"
    failed = CommandFailedError("m", result=CommandResult("c", exit_code=4))
    for e in (error, failed, DSecTimeoutError("t"), UnavailableError("u", reason="x")):
        again = pickle.loads(pickle.dumps(e))
        assert type(again) is type(e)
        assert str(again) == str(e)
        assert again.__dict__ == e.__dict__
    for value in vars(libdsec).values():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, DSecError)


def test_a_result_is_shown_short() -> None:
    result = CommandResult("c1", exit_code=3, stdout_bytes=b"x" * (64 << 20), stderr_bytes=b"why\n")
    assert len(repr(result)) < 500
    for part in ("command_id='c1'", "exit_code=3", "(67108864 bytes)", "stderr_bytes=b'why\\n'"):
        assert part in repr(result)
    assert repr(CommandResult("c2")) == "CommandResult(command_id='c2')"


def test_backoff() -> None:
    now = [0.0]
    backoff = Backoff(1.0, None, lambda: now[0], lambda low, high: high)
    delays = []
    with pytest.raises(UnavailableError) as caught:
        while True:
            delays.append(backoff.delay(UnavailableError("x")))
            now[0] += delays[-1]
    assert delays == [0.05, 0.1, 0.2, 0.4]
    assert caught.value.attempts == 5
    for error in (NotFoundError("x"), UnavailableError("x", reason="tls_failed"), DSecTimeoutError("x")):
        with pytest.raises(type(error)):
            Backoff(1.0, None, lambda: 0.0).delay(error)
    assert Backoff(1.0, None, lambda: 0.0).delay(DSecTimeoutError("x", reason="no_answer")) > 0
    for reason in ("too_many_requests", "out_of_descriptors"):
        assert Backoff(1.0, None, lambda: 0.0).delay(ResourceExhaustedError("x", reason=reason)) > 0
    with pytest.raises(ResourceExhaustedError):
        Backoff(1.0, None, lambda: 0.0).delay(ResourceExhaustedError("x", reason="quota_exceeded"))
    with pytest.raises(UnavailableError):
        Backoff(100.0, 5.0, lambda: 5.0).delay(UnavailableError("x"))


# Parsers of foreign bytes: whatever comes, a typed error or a value, and the same however it is cut.

SEEDS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: y",
    b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\nConnection: close",
    b"5;a=b\r\nhello\r\n0\r\nT: x\r\n\r\nrest",
    b"00a \r\n0123456789\r\n1\r\nx\r\n0\r\n\r\n",
    envelope(b'{"index":1}') + b"\2\0\0\0\x10" + b'{"error":{"a":1}',
    json.dumps({"result": {"commandId": "x", "stdout": {"data": "aGk=", "size": "2", "headSize": 2}}}).encode(),
    json.dumps(
        {"id": "s", "state": "STATE_READY", "spec": {"limits": {"pids": "5"}}, "createdAt": "2026-01-01T00:00:00Z"}
    ).encode(),
]


def mutations(count: int) -> list[bytes]:
    rng = random.Random(7)
    out = list(SEEDS)
    for _ in range(count):
        data = bytearray(rng.choice(SEEDS))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data) + 1)
            kind = rng.randrange(4)
            if kind == 0:
                data[at:at] = rng.choice([b"\r\n", b"\0", b":", b"{", b"[", b"99999999999", b"\xff", b"-1", b'"', b"null"])
            elif kind == 1:
                del data[at : at + rng.randint(1, 8)]
            elif kind == 2 and at < len(data):
                data[at] = rng.randrange(256)
            else:
                data[at:at] = rng.choice(SEEDS)[: rng.randint(0, 30)]
        out.append(bytes(data))
    return out


def outcome(call: object, *arguments: object) -> object:
    assert callable(call)
    try:
        return call(*arguments)
    except (ProtocolError, InternalError) as e:
        return type(e)


def chunked(data: bytes, sizes: list[int]) -> object:
    decoder = ChunkedDecoder()
    out = b""
    for start, end in zip([0, *sizes], [*sizes, len(data)], strict=True):
        out += decoder.feed(data[start:end])
    return out, decoder.done, decoder.rest


def enveloped(data: bytes, sizes: list[int]) -> object:
    decoder = EnvelopeDecoder()
    out = []
    for start, end in zip([0, *sizes], [*sizes, len(data)], strict=True):
        out += decoder.feed(data[start:end])
    return out, decoder.ended


def test_parsers_with_hostile_bytes() -> None:
    rng = random.Random(11)
    for data in mutations(3000):
        outcome(parse_head, data)
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randint(0, 8)))
        assert outcome(chunked, data, []) == outcome(chunked, data, cuts)
        assert outcome(enveloped, data, []) == outcome(enveloped, data, cuts)
        message = outcome(decode, data)
        if isinstance(message, dict):
            outcome(SandboxInfo.from_wire, message)
            outcome(command_result, message.get("result") if isinstance(message.get("result"), dict) else message)


def test_messages_with_fields_of_all_wrong_types() -> None:
    names = [
        "id",
        "state",
        "reason",
        "spec",
        "createdAt",
        "stepSeconds",
        "generation",
        "stdout",
        "stderr",
        "exitCode",
        "running",
        "startedAt",
        "commandId",
        "signal",
    ]
    values: list[object] = [None, 5, -1, 1.5, "x", "", [], [5], {}, {"a": 5}, True, "1e5", {"data": 5}, {"limits": 5}, 1e999]
    for name in names:
        for value in values:
            outcome(SandboxInfo.from_wire, {name: value})
            outcome(command_result, {name: value})


def test_times() -> None:
    assert parse_time("") is None
    for value, expected in (
        ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05+00:00"),
        ("2026-01-02T03:04:05.1Z", "2026-01-02T03:04:05.100000+00:00"),
        ("2026-01-02T03:04:05.123456789Z", "2026-01-02T03:04:05.123456+00:00"),
        ("2026-01-02T03:04:05+02:00", "2026-01-02T01:04:05+00:00"),
    ):
        moment = parse_time(value)
        assert moment is not None
        assert moment.isoformat() == expected
    for value in ("x", "2026-13-02T03:04:05Z", "2026-01-02", "2026-01-02T03:04:05", "0001-01-01T00:00:00+23:00"):
        with pytest.raises(InternalError):
            parse_time(value)


def test_encoding() -> None:
    assert encode({"a": "ü\u2028", "b": 1.5}) == '{"a":"ü\u2028","b":1.5}'.encode()
    with pytest.raises(InvalidArgumentError):
        encode({"a": "\ud800"})


def test_names_that_are_not_text() -> None:
    """They go as bytes, be they given as bytes or as ``os.fsdecode`` and listings escape them."""
    raw = "Yf8="
    change = FileChange
    for path in (b"a\xff", "a\udcff"):
        assert path_field(path) == {"rawPath": raw}
        assert path_fields([path, "/t"]) == {"rawPaths": [raw, "L3Q="]}  # all of them: they have an order
        both = {"rawFrom": raw, "rawTo": raw}
        for made, names in (
            (change.make_directory(path), {"rawPath": raw}),
            (change.move(path, path), both),
            (change.copy(path, path), both),
            (change.remove(path), {"rawPath": raw}),
            (change.chmod(path, 0), {"rawPath": raw}),
            (change.chown(path, "0"), {"rawPath": raw}),
            (change.symlink(path, path), {"rawPath": raw, "rawTarget": raw}),
            (change.hardlink("t", path), {"rawPath": raw, "target": "t"}),
        ):
            (message,) = made.message.values()
            assert {k: v for k, v in message.items() if isinstance(v, str) and k != "owner"} == names
    assert path_field("ü\n") == {"path": "ü\n"}
    assert path_fields(["/a", b"/b"]) == {"paths": ["/a", "/b"]}
