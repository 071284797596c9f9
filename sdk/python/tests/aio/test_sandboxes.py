"""Sandboxes: made, found, listed, ended; and nothing left of those that failed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from compat import sleep
from fake import KEY, Platform
from fakehttp import ApiError, Fault
from libdsec_api import DSecClient, Sandbox

from libdsec import (
    AuthenticationError,
    DSecConfig,
    DSecContainerRunArgs,
    DSecError,
    DSecTimeoutError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    State,
    UnavailableError,
)

ARGS = DSecContainerRunArgs("debian:12", labels={"job": "1"})


async def test_the_published_session(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_URL", platform.url)
    monkeypatch.setenv("DSEC_API_KEY", KEY)
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(
        container_image="debian:12",
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": True},
        init_user="root",
    )
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    assert result.stdout == "hello world\n"
    await sandbox.stop()
    assert sandbox.state is State.STOPPED
    spec = platform.boxes[sandbox.id].spec
    assert spec == {
        "backend": "container",
        "image": "debian:12",
        "limits": {"memoryBytes": "4294967296", "cpuCores": 4},
        "idleTimeoutSeconds": "300",
        "networkRules": {"npm": False, "pypi": True},
        "user": "root",
    }
    await client.close()


async def test_open_checks_the_key(config: DSecConfig, platform: Platform) -> None:
    with pytest.raises(AuthenticationError) as caught:
        await DSecClient(platform.url, "dsec_wrong").open()
    assert caught.value.reason == "unknown_key"
    assert "dsec_wrong" not in repr(caught.value) + str(caught.value)
    client = await DSecClient(platform.url, KEY).open()
    info = await client.system_info()
    assert (info.principal, info.nodes[0].memory_bytes, info.nodes[0].healthy) == ("tester", 1 << 30, True)
    assert KEY not in repr(client) + repr(client.config)
    await client.close()
    await client.close()
    with pytest.raises(FailedPreconditionError, match="closed"):
        await client.system_info()


async def test_unix_socket(platform: Platform) -> None:
    async with DSecClient(f"unix://{platform.unix_path}", KEY) as client:
        assert (await client.system_info()).version == "0.1"


async def test_nobody_there(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=DSecConfig(url="http://127.0.0.1:1", retry_seconds=0.2))
    with pytest.raises(ConnectionError, match="is it running") as caught:
        await client.open()
    assert isinstance(caught.value, UnavailableError)
    assert caught.value.attempts > 1
    await client.close()


async def test_context_manager_stops(config: DSecConfig, platform: Platform) -> None:
    async with DSecClient(config=config) as client:
        async with await client.run_container(ARGS) as sandbox:
            assert len(platform.live()) == 1
        assert not platform.live()
        await sandbox.stop()  # twice is no error
        with pytest.raises(KeyError):
            async with await client.run_container(ARGS):
                raise KeyError("mine")
        assert not platform.live()


async def test_a_failed_block_of_the_client_leaves_nothing(config: DSecConfig, platform: Platform) -> None:
    kept: Sandbox | None = None
    with pytest.raises(KeyError):
        async with DSecClient(config=config) as client:
            for _ in range(5):
                await client.run_container(ARGS)
            kept = await client.run_container(ARGS)
            kept.detach()
            raise KeyError("mine")
    assert kept is not None
    assert [b.id for b in platform.live()] == [kept.id]
    async with DSecClient(config=config) as client:
        await client.run_container(ARGS)
    assert len(platform.live()) == 2  # a block that ends well leaves its sandboxes to their times to live


async def test_a_lost_answer_creates_once(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    platform.fault("CreateSandbox", Fault(cut_at=10))
    platform.fault("CreateSandbox", Fault(before=True))
    await client.run_container(ARGS)
    assert platform.calls["CreateSandbox"] == 3
    assert len(platform.boxes) == 1
    await client.close()


async def test_a_create_that_was_undone_is_made_anew(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    platform.fault("CreateSandbox", Fault(before=True))
    canceled = ApiError(408, "canceled", "the create was cancelled", "create_canceled")
    platform.fault("CreateSandbox", Fault(status=408, error=canceled.body))
    await client.run_container(ARGS)
    assert len(platform.live()) == 1
    # Without a broken connection it was somebody else's wish.
    platform.fault("CreateSandbox", Fault(status=408, error=canceled.body))
    with pytest.raises(DSecError, match="cancelled"):
        await client.run_container(ARGS)
    await client.close()


async def test_an_idempotency_key(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    one = await client.run_container(ARGS, idempotency_key="job-7")
    two = await client.run_container(ARGS, idempotency_key="job-7")
    assert one.id == two.id
    await client.close()


async def test_a_create_that_takes_too_long_is_removed(platform: Platform) -> None:
    config = DSecConfig(platform.url, KEY, request_timeout=1, retry_seconds=0.3, cleanup_seconds=30)
    client = DSecClient(config=config)
    platform.create_delay = lambda key: 30
    with pytest.raises(TimeoutError) as caught:
        await client.run_container(ARGS, timeout=0.2)
    assert isinstance(caught.value, DSecTimeoutError)
    assert not platform.live()
    assert all(b.state == "STATE_STOPPED" for b in platform.boxes.values())
    await client.close()


async def test_errors_of_creates(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    with pytest.raises(NotFoundError) as caught:
        await client.run_container(DSecContainerRunArgs("missing:1"))
    assert caught.value.reason == "environment_not_found"
    assert caught.value.facts == {"image": "missing"}
    platform.create_error = lambda key: ApiError(429, "resource_exhausted", "quota", "quota_exceeded", limit="2")
    with pytest.raises(ResourceExhaustedError) as caught2:
        await client.run_container(ARGS)
    assert caught2.value.facts == {"limit": "2"}
    platform.fault("CreateSandbox", Fault(status=403, error={"code": "permission_denied", "message": "no"}))
    with pytest.raises(PermissionDeniedError):
        await client.run_container(ARGS)
    before = platform.calls["CreateSandbox"]
    for timeout in (0, -1, float("nan"), float("inf"), "1", True):
        with pytest.raises(ValueError, match="timeout"):
            await client.run_container(ARGS, timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        await client.run_container("debian")  # type: ignore[arg-type]
    assert platform.calls["CreateSandbox"] == before
    await client.close()


async def test_many(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    platform.create_delay = lambda key: 2.0 if key.endswith("/0") else 0.0
    platform.create_error = lambda key: (
        ApiError(429, "resource_exhausted", "full", "no_capacity") if key.endswith(("/3", "/13")) else None
    )
    results = [r async for r in client.run_containers(ARGS, 20)]
    assert sorted(r.index for r in results if r.index is not None) == list(range(20))
    assert results[-1].index == 0  # as they come
    failed = [r for r in results if isinstance(r, DSecError)]
    assert sorted(r.index for r in failed if r.index is not None) == [3, 13]
    assert all(isinstance(r, ResourceExhaustedError) and r.reason == "no_capacity" for r in failed)
    assert len(platform.live()) == 18
    assert platform.calls["CreateSandboxes"] == 1
    assert platform.calls["CreateSandbox"] == 0
    await client.close()


@pytest.mark.parametrize("cut", [0, 50, 400, 3000])
async def test_many_survive_a_broken_stream(config: DSecConfig, platform: Platform, cut: int) -> None:
    client = DSecClient(config=config)
    platform.fault("CreateSandboxes", Fault(cut_at=cut))
    results = [r async for r in client.run_containers(ARGS, 10)]
    assert sorted(r.index for r in results if r.index is not None) == list(range(10))
    assert all(isinstance(r, Sandbox) for r in results)
    assert len({r.id for r in results if isinstance(r, Sandbox)}) == 10
    assert len(platform.live()) == 10
    await client.close()


async def test_many_of_different_kinds(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    args = [DSecContainerRunArgs("missing" if i == 2 else f"i{i}") for i in range(6)]
    results = {r.index: r async for r in client.run_containers(args)}
    assert isinstance(results[2], NotFoundError)
    for i in (0, 1, 3, 4, 5):
        result = results[i]
        assert isinstance(result, Sandbox)
        assert platform.boxes[result.id].spec["image"] == f"i{i}"
    assert [r async for r in client.run_containers([])] == []
    await client.close()


async def test_many_abandoned_are_removed(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    platform.create_delay = lambda key: 0.0 if key.endswith(("/0", "/1", "/2")) else 20.0
    results = client.run_containers(ARGS, 12)
    first = await results.__anext__()
    await results.aclose()
    assert isinstance(first, Sandbox)
    for _ in range(6000):
        if all(b.state in ("STATE_READY", "STATE_STOPPED") for b in platform.boxes.values()):
            break
        await sleep(0.01)
    assert [b.id for b in platform.live()] == [first.id]
    assert platform.calls["DeleteSandbox"] == 11  # once for each, also for what had not begun
    await client.close()


@pytest.mark.parametrize("what", ["one request", "many requests"])
@pytest.mark.parametrize("how", ["break", "raise"])
async def test_many_left_in_the_middle_are_removed(config: DSecConfig, platform: Platform, what: str, how: str) -> None:
    kept: list[str] = []

    async def work() -> None:
        async with DSecClient(config=config) as client:
            results = client.run_containers(ARGS, 20) if what == "one request" else client.run_containers([ARGS] * 20)
            async for result in results:
                assert isinstance(result, Sandbox)
                result.detach()
                kept.append(result.id)
                while len(platform.live()) < 20:
                    await sleep(0.01)
                if how == "raise":
                    raise KeyError("mine")
                break

    if how == "raise":
        with pytest.raises(KeyError):
            await work()
    else:
        await work()
    assert [b.id for b in platform.live()] == kept
    assert len(kept) == 1


async def test_a_closed_client_has_removed_what_was_not_yielded(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    results = client.run_containers(ARGS, 20)
    first = await results.__anext__()
    assert isinstance(first, Sandbox)
    await client.close()
    assert [b.id for b in platform.live()] == [first.id]
    await results.aclose()
    with pytest.raises(FailedPreconditionError, match="closed"):  # and not: there was nothing to remove
        await client._cancel_create("key", time.monotonic() + 5)


async def test_the_removal_of_many_has_a_bound(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=replace(config, cleanup_seconds=0.3, request_timeout=60))
    results = client.run_containers(ARGS, 100)
    await results.__anext__()
    platform.fault("DeleteSandbox", Fault(delay=60, times=1000))
    start = time.monotonic()
    await results.aclose()
    await client.close()
    assert time.monotonic() - start < 30


async def test_nothing_is_removed_by_the_callers_own_key(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=replace(config, retry_seconds=0.2))
    before = await client.run_container(ARGS, idempotency_key="job-7")
    away = {"code": "unavailable", "message": "restarting"}
    platform.fault("CreateSandbox", Fault(status=503, error=away, times=50))
    with pytest.raises(UnavailableError):
        await client.run_container(ARGS, idempotency_key="job-7")
    assert platform.calls["DeleteSandbox"] == 0
    assert [b.id for b in platform.live()] == [before.id]
    await client.close()


async def test_the_callers_own_key_is_never_changed(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    platform.fault("CreateSandbox", Fault(before=True))
    canceled = ApiError(408, "canceled", "the create was cancelled", "create_canceled")
    platform.fault("CreateSandbox", Fault(status=408, error=canceled.body))
    await client.run_container(ARGS, idempotency_key="job-8")
    assert [b.key for b in platform.live()] == ["job-8"]
    await client.close()


async def test_many_refused_whole(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    platform.fault("CreateSandboxes", Fault(status=403, error={"code": "permission_denied", "message": "no"}))
    with pytest.raises(PermissionDeniedError):
        await client.run_containers(ARGS, 3).__anext__()
    for count in (0, -1, 100_001, True, 1.5, None):
        with pytest.raises(InvalidArgumentError):
            await client.run_containers(ARGS, count).__anext__()  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        await client.run_containers([ARGS], 3).__anext__()
    assert not platform.boxes
    await client.close()


async def test_get_and_list(config: DSecConfig, platform: Platform) -> None:
    client = DSecClient(config=config)
    made = [await client.run_container(DSecContainerRunArgs("x", labels={"n": str(i % 2)})) for i in range(8)]
    assert [s.id async for s in client.list_sandboxes()] == [s.id for s in made]
    assert [s.id async for s in client.list_sandboxes(labels={"n": "1"})] == [s.id for s in made[1::2]]
    await made[0].stop(wait=False)
    assert [s.id async for s in client.list_sandboxes(states=[State.STOPPED])] == [made[0].id]
    assert len([s async for s in client.list_sandboxes(states=["ready", "stopped"])]) == 8
    with pytest.raises(InvalidArgumentError, match="states are"):
        await client.list_sandboxes(states=["runing"]).__anext__()
    again = await client.get_sandbox(made[1].id)
    assert again.info.labels == {"n": "1"}
    assert again.info.created_at is not None
    assert again.info.created_at.isoformat() == "2026-01-02T03:04:05.123456+00:00"
    assert (await made[0].refresh()).reason is not None
    with pytest.raises(NotFoundError):
        await client.get_sandbox("nope")
    await client.close()
