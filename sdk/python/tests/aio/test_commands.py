"""Commands: results, output byte for byte, input, kill, broken connections."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime

import pytest
from fake import Platform
from fakehttp import Fault
from libdsec_api import DSecClient, Sandbox

from libdsec import (
    CommandFailedError,
    DSecConfig,
    DSecContainerRunArgs,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)

NASTY = b"\n\nfirst\r\n\0\xff\xfe \xc3\n\n" + bytes(range(256)) + b"\n\nno newline at the end"


async def make(config: DSecConfig) -> tuple[DSecClient, Sandbox]:
    client = DSecClient(config=config)
    return client, await client.run_container(DSecContainerRunArgs("debian:12"))


async def test_results(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    result = await sandbox.run_shell("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr) == (7, "out\n", "err\n")
    assert (result.signal, result.timed_out, result.killed, result.ok, result.running) == (0, False, False, False, False)
    assert result.duration is not None
    assert 0 <= result.duration < 10
    assert (await sandbox.exec(["printf", "%s|", "a b", "$HOME", ""])).stdout == "a b|$HOME||"
    assert (await sandbox.run_shell("pwd; echo $A", cwd="/", env={"A": "ä b"})).stdout == "/\nä b\n"
    result = await sandbox.run_shell("kill -TERM $$")
    assert (result.exit_code, result.signal, result.signal_name) == (143, 15, "SIGTERM")
    await client.close()


async def test_output_is_byte_exact(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    with open(os.path.join(platform.root, "nasty"), "wb") as f:
        f.write(NASTY)
    result = await sandbox.run_shell("cat nasty; cat nasty >&2")
    assert result.stdout_bytes == NASTY
    assert result.stderr_bytes == NASTY
    assert "\r\n\0\ufffd\ufffd \ufffd\n\n" in result.stdout
    await client.close()


async def test_long_output_is_fetched(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    data = os.urandom(900_000)
    with open(os.path.join(platform.root, "long"), "wb") as f:
        f.write(data)
    # The rest of the output comes over a connection that breaks twice.
    platform.fault("/stdout", Fault(cut_at=300_000))
    platform.fault("/stdout", Fault(cut_at=10))
    result = await sandbox.run_shell("cat long; cat long >&2; exit 3")
    assert result.stdout_bytes == data
    assert result.stderr_bytes == data
    assert result.exit_code == 3
    assert not result.stdout_truncated
    await client.close()


async def test_truncated_output_keeps_both_ends(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    result = await sandbox.run_shell("seq 1000000")
    assert result.stdout_truncated
    assert not result.stderr_truncated
    assert result.stdout_size == 6888896
    assert len(result.stdout_bytes) == 1 << 20
    assert result.stdout.startswith("1\n2\n3\n")
    assert result.stdout.endswith("\n999999\n1000000\n")
    await client.close()


async def test_timeout_is_the_platforms(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    result = await sandbox.run_shell("echo begun; sleep 100", timeout=0.2)
    if not result.stdout:  # on a slow machine the shell gets no further
        result = await sandbox.run_shell("echo begun; sleep 100", timeout=10)
    assert result.timed_out
    assert result.signal == 9
    assert result.stdout == "begun\n"
    assert not platform.running()
    await client.close()


async def test_waits_longer_than_one_request(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(replace(config, command_poll_seconds=0.05))
    result = await sandbox.run_shell("sleep 2; echo done")
    assert result.stdout == "done\n"
    assert platform.calls["GetCommand"] >= 2
    assert platform.calls["Exec"] == 1
    await client.close()


async def test_check(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    assert (await sandbox.run_shell("true", check=True)).ok
    with pytest.raises(CommandFailedError, match=r"exited with 5.*ends with: why") as caught:
        await sandbox.run_shell("echo out; echo why >&2; exit 5", check=True)
    assert caught.value.result.stdout == "out\n"
    with pytest.raises(CommandFailedError, match="ran out of time"):
        await sandbox.exec(["sleep", "9"], timeout=0.05, check=True)
    await client.close()


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 3_000_000, 16 << 20])
async def test_stdin_round_trip(config: DSecConfig, size: int) -> None:
    client, sandbox = await make(config)
    data = os.urandom(size)
    result = await sandbox.run_shell("sha256sum; cat >/dev/null", stdin=data)
    from hashlib import sha256

    assert result.stdout.split()[0] == sha256(data).hexdigest()
    assert not result.stdin_broken
    await client.close()


async def test_stdin_survives_broken_connections(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    data = os.urandom(3_500_000)
    platform.fault("/stdin", Fault(cut_at=5))  # written, but the answer is lost
    platform.fault("/stdin", Fault(before=True, skip=1))
    assert (await sandbox.exec(["cat"], stdin=data[:500_000])).stdout_bytes == data[:500_000]
    platform.fault("/stdin", Fault(cut_at=20, skip=1))
    result = await sandbox.exec(["md5sum"], stdin=data)
    from hashlib import md5

    assert result.stdout.split()[0] == md5(data).hexdigest()
    await client.close()


async def test_stdin_from_iterator_and_text(config: DSecConfig) -> None:
    client, sandbox = await make(config)

    async def pieces() -> AsyncIterator[bytes]:
        for i in range(5):
            yield b"%d\n" % i
        yield b""

    assert (await sandbox.exec(["cat"], stdin=pieces())).stdout == "0\n1\n2\n3\n4\n"
    assert (await sandbox.exec(["cat"], stdin="ü")).stdout_bytes == b"\xc3\xbc"
    assert (await sandbox.exec(["cat"])).stdout_bytes == b""
    with pytest.raises(InvalidArgumentError):
        await sandbox.exec(["cat"], stdin=5)  # type: ignore[arg-type]
    await client.close()


async def test_broken_pipe_is_reported(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    result = await sandbox.run_shell("head -c 3; exec 0<&-; sleep 0.2; exit 4", stdin=b"abcdef" * 700_000)
    assert result.stdout == "abc"
    assert result.exit_code == 4
    assert result.stdin_broken
    await client.close()


async def test_input_that_was_lost_is_an_error(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    detail = {"type": "dsec.v1.ErrorInfo", "debug": {"reason": "stdin_gap"}}
    error = {"code": "failed_precondition", "message": "only 5 bytes have arrived", "details": [detail]}
    platform.fault("/stdin", Fault(status=400, error=error))
    with pytest.raises(FailedPreconditionError):
        await sandbox.exec(["cat"], stdin=b"x" * 100_000)
    assert not platform.running()
    platform.fault("/stdin", Fault(status=499, error={"code": "canceled", "message": "reading the input failed"}))
    assert (await sandbox.exec(["cat"], stdin=b"x" * 100_000)).stdout_size == 100_000
    await client.close()


async def test_an_iterator_that_fails_kills_nothing_else(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"
        raise KeyError("mine")

    with pytest.raises(KeyError):
        await sandbox.exec(["cat"], stdin=pieces())
    assert not platform.running()
    assert (await sandbox.run_shell("echo on")).stdout == "on\n"
    await client.close()


@pytest.mark.parametrize("failure", [UnavailableError("mine"), ResourceExhaustedError("mine"), OSError("mine")])
async def test_input_that_fails_kills_the_command(config: DSecConfig, platform: Platform, failure: Exception) -> None:
    client, sandbox = await make(config)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"
        raise failure

    with pytest.raises(type(failure)) as caught:
        await sandbox.exec(["cat"], stdin=pieces())
    assert caught.value is failure
    assert not platform.running()
    await client.close()


async def test_clean_up_after_failed_input_has_a_bound(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(replace(config, cleanup_seconds=0.2, request_timeout=60))

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"
        raise KeyError("mine")

    platform.fault("KillCommand", Fault(delay=60, times=10))
    start = time.monotonic()
    with pytest.raises(KeyError):
        await sandbox.exec(["cat"], stdin=pieces())
    assert time.monotonic() - start < 30
    await client.close()


async def test_an_error_says_which_command_it_leaves(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(replace(config, command_poll_seconds=0.05, retry_seconds=0.2))
    away = {"code": "unavailable", "message": "restarting"}
    platform.fault("GetCommand", Fault(status=503, error=away, times=50))
    with pytest.raises(UnavailableError) as caught:
        await sandbox.run_shell("sleep 100")
    assert [p.id for p in platform.running()] == [caught.value.facts["command_id"]]
    platform.fault("Exec", Fault(status=503, error=away, times=50))
    with pytest.raises(UnavailableError) as caught:
        await sandbox.start("sleep 100")
    assert caught.value.facts["command_id"]
    await client.close()


async def test_a_signal_is_sent_once(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    command = await sandbox.start("trap 'echo got' USR1; echo ready; while :; do sleep 0.05; done")
    async for piece in command.iter_stdout():
        assert piece == b"ready\n"
        break
    for cut in (0, 5):
        platform.fault("KillCommand", Fault(cut_at=cut))
        with pytest.raises(UnavailableError):
            await command.kill(10)
    assert platform.calls["KillCommand"] == 2
    platform.fault("KillCommand", Fault(cut_at=0, times=2))
    await command.kill()  # this one is repeated
    assert platform.calls["KillCommand"] == 5
    assert (await command.wait()).killed
    await client.close()


async def test_input_in_several_writes(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    command = await sandbox.start(["cat"], stdin_open=True)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"two "
        yield b"three "

    assert await command.write_stdin(b"one ", close=False)
    assert await command.write_stdin(pieces(), close=False)
    assert await command.write_stdin(b"four")
    assert (await command.wait()).stdout == "one two three four"

    command = await sandbox.start(["cat"], stdin_open=True)
    detail = {"type": "dsec.v1.ErrorInfo", "debug": {"reason": "stdin_gap"}}
    error = {"code": "failed_precondition", "message": "only 5 bytes have arrived", "details": [detail]}
    platform.fault("/stdin", Fault(status=400, error=error))
    for reason in ("stdin_gap", "stdin_interrupted"):
        with pytest.raises(FailedPreconditionError) as caught:
            await command.write_stdin(b"lost", close=False)
        assert caught.value.reason == reason
    await command.kill()
    await client.close()


@pytest.mark.parametrize("cut", [0, 1, 20, 150, 250])
async def test_a_lost_answer_never_runs_a_command_twice(config: DSecConfig, platform: Platform, cut: int) -> None:
    client, sandbox = await make(config)
    platform.fault("Exec", Fault(cut_at=cut))
    result = await sandbox.run_shell(f"echo x >>runs{cut}; cat runs{cut}")
    assert result.stdout == "x\n"
    assert platform.calls["Exec"] == 2
    await client.close()


async def test_a_lost_request_is_sent_again(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    platform.fault("Exec", Fault(before=True, times=2))
    assert (await sandbox.run_shell("echo once")).stdout == "once\n"
    await client.close()


async def test_an_unavailable_edge_is_waited_for(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    error = {"code": "unavailable", "message": "the edge is restarting"}
    platform.fault("GetCommand", Fault(status=503, error=error, times=3))
    assert (await sandbox.run_shell("sleep 0.7; echo there")).stdout == "there\n"
    platform.fault("Exec", Fault(status=503, error=error, times=100))
    with pytest.raises(UnavailableError, match="edge is restarting") as caught:
        await sandbox.run_shell("true")
    assert caught.value.attempts > 3
    await client.close()


async def test_errors_of_commands(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    with pytest.raises(NotFoundError) as caught:
        await sandbox.exec(["no-such-program"])
    assert caught.value.reason == "program_not_found"
    assert caught.value.sandbox_id == "sfake"
    with pytest.raises(InvalidArgumentError):
        await sandbox.exec([])
    with pytest.raises(InvalidArgumentError):
        await sandbox.exec("ls -l")
    with pytest.raises(InvalidArgumentError):
        await sandbox.run_shell("")
    with pytest.raises(InvalidArgumentError, match="NUL"):
        await sandbox.exec(["a\0b"])
    with pytest.raises(ValueError, match="greater than 0"):
        await sandbox.run_shell("true", timeout=0)
    with pytest.raises(InvalidArgumentError, match="surrogate"):
        await sandbox.run_shell("echo \udcff")
    assert platform.calls["Exec"] == 1
    await sandbox.stop()
    with pytest.raises(FailedPreconditionError, match="ended"):
        await sandbox.run_shell("true")
    await client.close()


async def test_answers_that_make_no_sense(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    errors: list[dict[str, object]] = [
        {"result": {"exitCode": "many"}},
        {"result": {"stdout": {"data": "!"}}},
        {"result": {"stdout": {"size": "5", "headSize": "9"}}},
        {"result": []},
        {},
    ]
    for error in errors:
        platform.fault("Exec", Fault(status=200, error=error))
        with pytest.raises(InternalError) as caught:
            await sandbox.run_shell("true")
        assert caught.value.reason == "bad_response"
    await client.close()


async def test_started_commands(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    command = await sandbox.start("echo a; sleep 2; echo b; echo c >&2; exit 2")
    assert (await command.poll()).running
    seen = b""
    async for piece in command.iter_stdout():
        seen += piece
    assert seen == b"a\nb\n"
    assert b"".join([p async for p in command.iter_stderr(1)]) == b"\n"
    assert (await command.wait()).exit_code == 2
    assert (await sandbox.command(command.id).wait()).stdout == "a\nb\n"
    listed = await sandbox.list_commands()
    assert [c.command_id for c in listed] == [command.id]

    command = await sandbox.start(["sleep", "100"])
    await command.kill(15)
    assert (await command.wait()).signal == 15
    command = await sandbox.start("sleep 100 & sleep 100")
    await command.kill()
    assert (await command.wait()).killed
    await command.kill()  # of what has ended is no error
    with pytest.raises(InvalidArgumentError):
        await command.kill(65)

    command = await sandbox.start(["cat"], stdin_open=True)
    assert await command.write_stdin(b"hello")
    assert (await command.wait()).stdout == "hello"
    assert not platform.running()
    await client.close()


async def test_following_survives_broken_connections(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(replace(config, command_poll_seconds=0.1))
    platform.fault("/stdout", Fault(cut_at=170))
    # In silence the platform ends its answers, and is asked again.
    command = await sandbox.start("for i in $(seq 40); do echo line $i; done; sleep 0.5; echo end")
    seen = b"".join([p async for p in command.iter_stdout()])
    assert seen == b"".join(b"line %d\n" % i for i in range(1, 41)) + b"end\n"
    assert platform.calls[f"GET /v1/sandboxes/{sandbox.id}/commands/{command.id}/stdout"] >= 3
    await client.close()


async def test_a_stream_cut_at_every_byte_is_exact(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    command = await sandbox.start("printf 'a\\r\\n\\n\\377\\000b'")
    await command.wait()
    for cut in range(240):  # of an answer with less
        platform.fault("/stdout", Fault(cut_at=cut))
        seen = b"".join([p async for p in command.output(follow=cut % 2 == 0)])
        assert seen == b"a\r\n\n\377\0b", cut
    await client.close()


async def test_output_from_its_end(config: DSecConfig, platform: Platform) -> None:
    client, sandbox = await make(config)
    command = await sandbox.start("echo one; echo two; read x; echo three", stdin_open=True)
    platform.fault("/stdout", Fault(cut_at=160))  # what is asked for after that does not begin at the end again
    follower = command.output(tail=2, follow=True)
    while len((await command.poll()).stdout) < 8:
        pass
    seen = await follower.__anext__()
    assert await command.write_stdin(b"\n")
    async for piece in follower:
        seen += piece
    assert seen == b"o\nthree\n"
    assert b"".join([p async for p in command.output(offset=4)]) == b"two\nthree\n"
    for bad in (
        {"tail": -1},
        {"tail_lines": 1.5},
        {"offset": True},
        {"since": "now"},
        {"since": datetime(2026, 1, 1)},
        {"stream": "x"},
    ):
        with pytest.raises(InvalidArgumentError):
            await command.output(**bad).__anext__()
    await client.close()


async def test_a_large_script(config: DSecConfig) -> None:
    client, sandbox = await make(config)
    result = await sandbox.run_shell("echo 1\n" + "# filling\n" * 10_000)
    assert result.stdout == "1\n"
    await client.close()
