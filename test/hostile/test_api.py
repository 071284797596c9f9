"""The public API, attacked from its network: by hand, since the SDK would not send this."""

from __future__ import annotations

import http.client
import json
import socket

import pytest
from attacked import Box
from platform_under_test import Platform

ROUTES = ["/v1/sandboxes/{}/files?path=/etc/hostname", "/v1/sandboxes/{}/commands/c/stdout", "/dsec.v1.SandboxService/GetSandbox", "/", "/metrics", "/debug/pprof/"]


def get(platform: Platform, target: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", platform.port, timeout=60)
    try:
        connection.request("GET", target, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def raw(platform: Platform, request: bytes) -> bytes:
    """What comes back for these bytes until the server hangs up."""
    with socket.create_connection(("127.0.0.1", platform.port), timeout=60) as s:
        s.sendall(request)
        s.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := s.recv(65536):
            answer += piece
        return answer


@pytest.mark.parametrize("route", ROUTES)
def test_without_a_key(platform: Platform, box: Box, route: str) -> None:
    target = route.format(box.sandbox.id)
    key = platform.key()
    for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": key}, {"Authorization": f"Bearer {key[:-1]}"}, {"Authorization": f"Bearer {key}0"},
                    {"Authorization": f"Basic {key}"}, {"Dsec_Grant": key}, {"X_Forwarded_User": "admin"}):  # fmt: skip
        status, body = get(platform, target, **headers)
        assert status == 401 and b"dsec_" not in body.replace("dsec_…".encode(), b"")


def test_only_health_is_open(platform: Platform) -> None:
    assert get(platform, "/healthz") == (200, b"ok\n")
    for path in ("/healthz/", "//healthz", "/healthz/..", "/healthz/../v1", "/healthz%2f..%2fv1"):
        assert get(platform, path)[0] == 401


def test_a_grant_of_the_callers_own_is_not_passed_on(platform: Platform, box: Box) -> None:
    target = f"/v1/sandboxes/{box.sandbox.id}/files?path=/etc/hostname"
    status, body = get(platform, target, Authorization=f"Bearer {platform.key()}", Dsec_Grant="forged", Connection="Dsec-Grant, Authorization")
    assert (status, body.decode()) == (200, box.out("cat /etc/hostname") + "\n")


def test_unknown_and_malformed_ids_reach_nothing(platform: Platform, box: Box) -> None:
    auth = {"Authorization": f"Bearer {platform.key()}"}
    other = box.sandbox.id[:-1] + ("a" if box.sandbox.id[-1] != "a" else "b")
    for i in (other, "x", "..", "%2e%2e", "..%2f..", box.sandbox.id + "%00", box.sandbox.id.upper(), box.sandbox.id + "%2f..%2f" + box.sandbox.id, "a" * 5000):
        status, body = get(platform, f"/v1/sandboxes/{i}/files?path=/etc/hostname", **auth)
        assert status in {400, 404}, (i, status, body)
        assert json.loads(body)["code"] in {"invalid_argument", "not_found"}
    for cmd in ("..", "%2e%2e%2f%2e%2e", "a%2f..%2fb", "x" * 65, "%00"):
        status, body = get(platform, f"/v1/sandboxes/{box.sandbox.id}/commands/{cmd}/stdout", **auth)
        assert status in {400, 404}, (cmd, status, body)


@pytest.mark.parametrize(
    "head",
    [
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        "Transfer-Encoding: xchunked",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: -1",
        "Content-Length: 5x",
    ],
)
def test_one_request_is_not_taken_for_two(platform: Platform, box: Box, head: str) -> None:
    """A body whose end two servers would see in different places: the second request in it is never answered.

    A length beside chunks is not among them: Go's server lets the chunks decide, as RFC 9112 has it.
    """
    line = f"PUT /v1/sandboxes/{box.sandbox.id}/files?path=/tmp/smuggled HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {platform.key()}\r\n"
    inner = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = raw(platform, f"{line}{head}\r\n\r\n0\r\n\r\n{inner}".encode())
    assert answer.count(b"HTTP/1.1 ") == 1, answer
    box.assert_well()


def test_query_and_headers_stay_data(platform: Platform, box: Box) -> None:
    auth = {"Authorization": f"Bearer {platform.key()}"}
    base = f"/v1/sandboxes/{box.sandbox.id}/files?path=/etc/hostname"
    for more in ("&path=/etc/shadow", "&user=0%0d%0aDsec-Grant:x", "&offset=-1", "&offset=99999999999999999999", "&length=1e9", "&user=%00", "&user=" + "a" * 5000):
        status, body = get(platform, base + more, **auth)
        assert status in {200, 400, 404, 416}, (more, status, body)
        assert status != 200 or b"root:" not in body
    for value in ("bytes=0-18446744073709551616", "bytes=-0", "bytes=5-1", "bytes=0-0,1-1", "x" * 1000, "bytes=9223372036854775807-"):
        assert get(platform, base, Range=value, **auth)[0] in {200, 206, 416}
    box.assert_well()


def test_sockets_of_the_platform_are_roots(platform: Platform) -> None:
    assert platform.run.stat().st_mode & 0o077 == 0 and platform.run.stat().st_uid == 0
    assert (platform.data / "edge").stat().st_mode & 0o077 == 0
    assert platform.config.stat().st_mode & 0o077 == 0  # it holds the key
    for path in platform.data.iterdir():
        assert path.stat().st_mode & 0o022 == 0, path
    assert platform.key() not in platform.log()
