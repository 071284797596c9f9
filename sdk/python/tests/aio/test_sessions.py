"""Sessions: what is asked for, and what is refused before."""

from __future__ import annotations

import pytest
from fake import Platform
from fakehttp import Fault
from libdsec_api import DSecClient, Sandbox, Session

from libdsec import DSecConfig, DSecContainerRunArgs, InvalidArgumentError, NotFoundError


async def make(config: DSecConfig) -> tuple[DSecClient, Sandbox]:
    client = DSecClient(config=config)
    return client, await client.run_container(DSecContainerRunArgs("debian:12"))


async def test_session(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    async with await sandbox.session("s", cwd="/tmp", user="root", env={"A": "b"}) as session:
        box = next(iter(platform.boxes.values()))
        assert box.sessions["s"]["asked"] == {
            "sandboxId": sandbox.id,
            "name": "s",
            "cwd": "/tmp",
            "user": "root",
            "env": {"A": "b"},
        }
        result = await session.run("cat; exit 3", stdin="in", timeout=30, tag="t", command_id="c")
        assert result.stdout == "in"
        assert result.exit_code == 3
        sent = box.commands["c"].command
        assert sent["session"] == "s"
        assert sent["tag"] == "t"
        assert sent["timeoutSeconds"] == 30
        command = await session.start("echo started")
        assert (await command.wait()).stdout == "started\n"
        assert [s.name for s in await sandbox.list_sessions()] == ["s"]
        assert (await session.refresh()).shell == "bash"
    assert await sandbox.list_sessions() == []
    await session.close()
    with pytest.raises(NotFoundError, match="session"):
        await session.run("true")
    with pytest.raises(NotFoundError, match="session"):
        await session.refresh()
    other = await sandbox.session()
    assert other.name != (await sandbox.session()).name
    await client.close()


async def test_sessions_are_checked(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    for name in ("", "a b", "x" * 65, "a/b"):
        with pytest.raises(InvalidArgumentError):
            await sandbox.session(name)
    for bad in ({"cwd": 3}, {"user": ""}, {"env": {"A": 1}}):
        with pytest.raises(InvalidArgumentError):
            await sandbox.session("s", **bad)
    session: Session = await sandbox.session("s")
    for script, more in (
        ("", {}),
        ("a\0b", {}),
        ("true", {"timeout": 0}),
        ("true", {"stdin": b"x" * 65537}),
        ("true", {"stdin": 3}),
    ):
        with pytest.raises(InvalidArgumentError):
            await session.run(script, **more)
    assert not platform.calls["/dsec.v1.SandboxService/Exec"]
    await client.close()


async def test_session_over_a_broken_connection(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    platform.fault("/dsec.v1.SandboxService/CreateSession", Fault(before=True))
    platform.fault("/dsec.v1.SandboxService/DeleteSession", Fault(cut_at=10))
    async with await sandbox.session("s") as session:
        assert (await session.run("echo one")).stdout == "one\n"
    assert await sandbox.list_sessions() == []
    await client.close()
