"""The transport against a server that misbehaves."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from compat import sleep
from fake import Platform
from fakehttp import Fault
from libdsec_api import Api, DSecClient

from libdsec import (
    DSecConfig,
    DSecContainerRunArgs,
    DSecError,
    DSecTimeoutError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)

INFO = b'{"version":"9"}'


async def info(api: Api, *, retry: bool = False) -> str:
    return str((await api.call("GetInfo", {}, service="SystemService", retry=retry))["version"])


@pytest.mark.parametrize(
    "fault",
    [
        Fault(piece=1),
        Fault(piece=3, chunked=2),
        Fault(chunked=1),
        Fault(prefix=b"HTTP/1.1 100 Continue\r\n\r\n"),
        Fault(prefix=b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 3, piece=7),
        Fault(prefix=b"HTTP/1.1 102 Processing\r\nContent-Length: 5\r\n\r\n"),
        Fault(raw=b"HTTP/1.0 200 OK\r\n\r\n" + INFO),
        Fault(raw=b"HTTP/1.1 200\r\ncontent-LENGTH:   15  \r\nX: " + b"y" * 60_000 + b"\r\n\r\n" + INFO),
        Fault(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n00f \r\n" + INFO + b"\r\n0\r\n\r\n"),
    ],
)
async def test_odd_but_valid(config: DSecConfig, platform: Platform, fault: Fault) -> None:
    api = Api(config)
    platform.fault("GetInfo", fault)
    assert await info(api) in ("0.1", "9")
    assert await info(api) == "0.1"
    api.close()


LONG = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200OK\r\nContent-Length: 15\r\n\r\n" + INFO,
        LONG + b"Content-Length: 15\r\nContent-Length: 16\r\n\r\n" + INFO,
        LONG + b"Content-Length: -1\r\n\r\n",
        LONG + b"Content-Length: 1_5\r\n\r\n" + INFO,
        LONG + b"Content-Length: 99999999999999999999\r\n\r\n" + INFO,
        LONG + b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\nf\r\n" + INFO + b"\r\n0\r\n\r\n",
        LONG + b"Transfer-Encoding: gzip\r\n\r\n" + INFO,
        LONG + b"Content-Length : 15\r\n\r\n" + INFO,
        LONG + b"A: b\r\n folded\r\nContent-Length: 15\r\n\r\n" + INFO,
        LONG + b"X: " + b"y" * 70_000 + b"\r\nContent-Length: 15\r\n\r\n" + INFO,
        LONG + b"X: y\r\n" * 300 + b"Content-Length: 15\r\n\r\n" + INFO,
        LONG + b"X: y\n\r\nContent-Length: 15\r\n\r\n" + INFO,
        LONG + b"y" * 200_000,
        LONG + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n" + INFO,
        LONG + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\n" + INFO,
        LONG + b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + INFO + b"\r\n0\r\n\r\n",
        LONG + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000,
        LONG + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 5000,
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
        LONG + b"Content-Length: 16\r\n\r\n" + INFO,
        LONG + b"Transfer-Encoding: chunked\r\n\r\nf\r\n" + INFO + b"\r\n",
        b"",
        b"HTT",
    ],
)
async def test_what_is_not_http_is_an_error(config: DSecConfig, platform: Platform, raw: bytes) -> None:
    api = Api(config)
    platform.fault("GetInfo", Fault(raw=raw))
    with pytest.raises(UnavailableError) as caught:
        await info(api)
    assert caught.value.reason in ("protocol_error", "connection_lost")
    assert await info(api) == "0.1"
    platform.fault("GetInfo", Fault(raw=raw))
    assert await info(api, retry=True) == "0.1"
    api.close()


@pytest.mark.parametrize("body", [b"{", b"[]", b"nope", b"\xff", b"[" * 100_000, b'"x"', b""])
async def test_what_is_not_json_is_an_error(config: DSecConfig, platform: Platform, body: bytes) -> None:
    api = Api(config)
    platform.fault("GetInfo", Fault(raw=LONG + b"Content-Length: %d\r\n\r\n" % len(body) + body))
    with pytest.raises(InternalError) as caught:
        await info(api)
    assert caught.value.reason == "bad_response"
    api.close()


@pytest.mark.parametrize(
    ("status", "body", "kind", "reason"),
    [
        (502, b"<html>Bad Gateway</html>", UnavailableError, "http_502"),
        (599, b"{}", UnavailableError, "http_599"),
        (429, b"slow down", ResourceExhaustedError, "http_429"),
        (302, b"", InternalError, "http_302"),
        (400, b'{"code": 7}', InternalError, "http_400"),
        (500, b'{"code":"brand_new","message":"m","details":{"x":1}}', InternalError, ""),
        (400, b'{"code":"internal","message":5,"details":[7,{"type":"dsec.v1.ErrorInfo","debug":8}]}', InternalError, ""),
    ],
)
async def test_errors_of_all_kinds(
    config: DSecConfig, platform: Platform, status: int, body: bytes, kind: type[DSecError], reason: str
) -> None:
    api = Api(config)
    platform.fault("GetInfo", Fault(raw=b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)))
    with pytest.raises(kind) as caught:
        await info(api)
    assert caught.value.reason == reason
    api.close()


async def test_silence_has_an_end(config: DSecConfig, platform: Platform) -> None:
    api = Api(replace(config, request_timeout=1))
    platform.fault("GetInfo", Fault(delay=60))
    start = time.monotonic()
    with pytest.raises(DSecTimeoutError) as caught:
        await info(api)
    assert caught.value.reason == "no_answer"
    assert "1 s (request_timeout)" in str(caught.value)
    assert time.monotonic() - start < 30
    platform.fault("GetInfo", Fault(delay=60))
    assert await info(api, retry=True) == "0.1"  # the second attempt has a time of its own
    api.close()


async def test_a_dripping_head_has_an_end(config: DSecConfig, platform: Platform) -> None:
    api = Api(replace(config, request_timeout=0.3))
    # Each byte comes in time, and the head is far from too long.
    platform.fault("GetInfo", Fault(prefix=b"HTTP/1.1 100 Continue\r\nX: " + b"y" * 30_000, piece=1, pause=0.01))
    with pytest.raises(DSecTimeoutError) as caught:
        await info(api)
    assert caught.value.reason == "no_answer"
    api.close()


async def test_a_head_in_pieces_has_a_largest_size(config: DSecConfig, platform: Platform) -> None:
    api = Api(replace(config, request_timeout=60))
    platform.fault("GetInfo", Fault(prefix=b"HTTP/1.1 100 Continue\r\nX: " + b"y" * 300_000, piece=1000))
    with pytest.raises(UnavailableError, match="headers of more than") as caught:
        await info(api)
    assert caught.value.reason == "protocol_error"
    api.close()


async def test_an_answer_before_the_end_of_the_request_costs_the_connection(config: DSecConfig, platform: Platform) -> None:
    api = Api(config)
    platform.fault("Exec", Fault(early=True, mute=True))
    with pytest.raises(ResourceExhaustedError):
        await api.call("Exec", {"filling": "x" * (64 << 20)})
    assert not api.http._idle
    assert await info(api) == "0.1"
    api.close()


async def test_kept_connections(config: DSecConfig, platform: Platform) -> None:
    api = Api(config)
    for _ in range(10):
        await info(api)
    assert platform.connections == 1
    platform.drop_connections()
    await info(api)  # without retries: a dead kept connection is no failure
    assert platform.connections == 2
    # The server closes just as the request is on its way.
    platform.fault("GetInfo", Fault(before=True))
    assert await info(api) == "0.1"
    assert platform.connections == 3
    # An answer that says so ends the connection.
    platform.fault("GetInfo", Fault(raw=LONG + b"Connection: close\r\nContent-Length: 15\r\n\r\n" + INFO))
    await info(api)
    await info(api)
    assert platform.connections == 4
    # So does one with more bytes than it said.
    platform.fault("GetInfo", Fault(prefix=b"", raw=LONG + b"Content-Length: 15\r\n\r\n" + INFO + b"HTTP/1.1 200 OK\r\n"))
    await info(api)
    await info(api)
    assert platform.connections == 5
    api.close()


async def test_kept_connections_expire(config: DSecConfig, platform: Platform) -> None:
    api = Api(replace(config, keep_alive_seconds=0.05))
    await info(api)
    await sleep(0.1)
    await info(api)
    assert platform.connections == 2
    api.close()


async def test_a_stream_of_another_type(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    platform.fault("CreateSandboxes", Fault(status=200, error={"code": "unavailable", "message": "gateway"}))
    with pytest.raises(InternalError, match="another type"):
        await client.run_containers(DSecContainerRunArgs("x"), 2).__anext__()
    await client.close()


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (b"\1\0\0\0\2{}", InternalError),
        (b"\0\xff\xff\xff\xff", InternalError),
        (b"\0\0\0\0\1{", InternalError),
        (b'\2\0\0\0\x27{"error":{"code":"resource_exhausted"}}', ResourceExhaustedError),
    ],
)
async def test_streams_that_make_no_sense(config: DSecConfig, platform: Platform, frames: bytes, kind: type[DSecError]) -> None:
    client = DSecClient(config=config)
    head = LONG + b"Content-Type: application/connect+json\r\nContent-Length: %d\r\n\r\n" % len(frames)
    platform.fault("CreateSandboxes", Fault(raw=head + frames))
    with pytest.raises(kind):
        await client.run_containers(DSecContainerRunArgs("x"), 2).__anext__()
    await client.close()
