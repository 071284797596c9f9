"""Servers inside, as libdsec speaks to them: what is sent, what is refused, redirects, and raw connections that are cut."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from fake import Platform
from fakehttp import Fault, Request
from libdsec_api import DSecClient, Sandbox

from libdsec import (
    DSecConfig,
    DSecContainerRunArgs,
    DSecTimeoutError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)


async def make(config: DSecConfig) -> tuple[DSecClient, Sandbox]:
    client = DSecClient(config=config)
    return client, await client.run_container(DSecContainerRunArgs("debian:12"))


def answer(status: str, *headers: str, body: bytes = b"") -> Fault:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return Fault(raw="\r\n".join(lines).encode() + body)


def asked(platform: Platform) -> list[Request]:
    return [r for r in platform.requests if r.path.endswith("/http") or "/ports/" in r.path]


SECRETS = {"Authorization": "Basic abc", "Cookie": "a=b", "X-Other": "c"}


@pytest.mark.parametrize(
    ("status", "location", "method", "url", "sent"),
    [
        ("302 Found", "/b?c", "GET", "http://one:80/b?c", {"authorization", "cookie", "x-other"}),
        ("302 Found", "http://two/b", "GET", "http://two/b", {"x-other"}),
        ("307 Same", "http://one:81/b", "POST", "http://one:81/b", {"x-other"}),
        ("308 Same", "https://one:80/b", "POST", "https://one:80/b", {"x-other"}),
        ("303 Other", "b", "GET", "http://one:80/b", {"authorization", "cookie", "x-other"}),
    ],
)
async def test_redirects(
    config: DSecConfig, platform: Platform, status: str, location: str, method: str, url: str, sent: set[str]
) -> None:
    """Credentials go to the server they were given for, and to no other."""
    client, sandbox = await make(config)
    platform.fault("/http", answer(status, f"Location: {location}"))
    platform.fault("/http", answer("200 OK", body=b"there"))
    async with await sandbox.http("POST", "http://one:80/a", headers=SECRETS, body=b"x", follow_redirects=True) as got:
        assert (await got.text(), got.url) == ("there", url)
    first, second = asked(platform)
    assert (first.query["url"], first.method) == ("http://one:80/a", "POST")
    assert (second.query["url"], second.method) == (url, method)
    assert {"authorization", "cookie", "x-other"} & {k for k in second.headers if second.headers[k] in SECRETS.values()} == sent
    assert second.headers.get("content-length", "0") == ("1" if method == "POST" else "0")
    await client.close()


async def test_redirects_that_cannot_be_followed(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    platform.fault("/http", answer("302 Found", "Location: /b"))
    async with await sandbox.http("GET", "http://one/a") as got:
        assert (got.status, got.headers["location"]) == (302, "/b")
    for _ in range(21):
        platform.fault("/http", answer("302 Found", "Location: /b"))
    with pytest.raises(UnavailableError) as caught:
        await sandbox.http("GET", "http://one/a", follow_redirects=True)
    assert caught.value.reason == "too_many_redirects"
    assert len(asked(platform)) == 22
    await client.close()


async def test_what_cannot_be_sent(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    for number in (0, -1, 65536, True, "80"):
        with pytest.raises(InvalidArgumentError):
            sandbox.port(number)  # type: ignore[arg-type]
    port = sandbox.port(80)
    for path in ("", "x", "/a b", "/a\r\nX: y", "/ü"):
        with pytest.raises(InvalidArgumentError):
            await port.http("GET", path)
        with pytest.raises(InvalidArgumentError):
            port.url(path)
    for name, value in {
        "Host": "x",
        "content-length": "1",
        "Transfer-Encoding": "chunked",
        "Dsec-Authorization": "x",
        "X Y": "z",
        "X": "a\r\nY: b",
        "Z": "\0",
        "": "x",
    }.items():
        with pytest.raises(InvalidArgumentError):
            await port.http("GET", headers={name: value})
    for method in ("", "GE T", "GET / HTTP/1.1\r\nX:"):
        with pytest.raises(InvalidArgumentError):
            await port.http(method)
    for timeout in (0, -1, float("nan")):
        with pytest.raises(InvalidArgumentError):
            await port.http("GET", timeout=timeout)
    with pytest.raises(InvalidArgumentError) as caught:
        await port.http("POST", body="\udc80")
    assert caught.value.reason == "invalid_text"
    assert asked(platform) == []
    await client.close()


async def test_who_answers(config: DSecConfig, platform: Platform) -> None:
    """An error of the server inside is an answer; one of the platform is raised. Nothing is asked twice."""
    client, sandbox = await make(config)
    port = sandbox.port(80)
    platform.fault("/ports/80/http", answer("500 Oops", "Dsec-Inner-Set-Cookie: a=b", "Content-Security-Policy: sandbox"))
    async with await port.http("POST", "/x%2Fy//?z", headers={"Authorization": "Basic abc"}) as got:
        assert got.status == 500
        assert got.headers["set-cookie"] == "a=b"
        assert "content-security-policy" not in got.headers
    request = asked(platform)[0]
    assert (request.path.partition("/http")[2], request.raw_query) == ("/x%2Fy//", "z")
    assert request.headers["authorization"] == "Basic abc"
    assert request.headers["dsec-authorization"] == f"Bearer {platform.key}"
    told = b'{"code":"failed_precondition","message":"m","details":[{"type":"dsec.v1.ErrorInfo","debug":{"reason":"port_refused"}}]}'
    platform.fault("/ports/80/http", answer("502 Bad", "Dsec-Error: port_refused", body=told))
    with pytest.raises(FailedPreconditionError) as refused:
        await port.http("GET")
    assert refused.value.reason == "port_refused"
    before = len(asked(platform))
    for fault in (Fault(before=True), Fault(raw=b"HTTP/1.1 200"), Fault(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")):
        platform.fault("/ports/80/http", fault)
        with pytest.raises(UnavailableError):
            await (await port.http("GET")).read()
        before += 1
        assert len(asked(platform)) == before
    await client.close()


SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: dsec-tcp-frames\r\n\r\n"


async def test_connections_that_end_and_that_are_cut(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    port = sandbox.port(80)
    whole = b"\0\0\0\x05hello\0\0\0\x01!\0\0\0\0"
    platform.fault("/tcp", Fault(raw=SWITCHED + whole))
    async with await port.connect() as stream:
        assert b"".join([piece async for piece in stream]) == b"hello!"
        assert await stream.read() == b""
    for cut in range(len(whole)):  # what is cut anywhere before the last byte has not ended
        platform.fault("/tcp", Fault(raw=SWITCHED + whole[:cut]))
        async with await port.connect() as stream:
            with pytest.raises(UnavailableError) as caught:
                while await stream.read():
                    pass
            assert caught.value.reason == "connection_lost", cut
    platform.fault("/tcp", Fault(raw=SWITCHED + b"\xff\xff\xff\xff" + bytes(100)))
    async with await port.connect() as stream:
        with pytest.raises(UnavailableError, match="too long"):
            await stream.read()
    await client.close()


async def test_a_connection_that_is_never_answered(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        hung = DSecClient(config=replace(config, url=f"http://127.0.0.1:{deaf.getsockname()[1]}", request_timeout=0.3))
        with pytest.raises(DSecTimeoutError, match=r"0\.3 s \(request_timeout\)") as caught:
            await Sandbox(hung, sandbox.info).port(80).connect()
        assert caught.value.reason == "no_answer"
        await hung.close()
    await client.close()
