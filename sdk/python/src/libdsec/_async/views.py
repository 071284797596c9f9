"""What a sandbox uses, and what runs in it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from .. import _aio as net
from .._args import invalid
from .._errors import DSecError, FailedPreconditionError
from .._models import Message, items, number, real, sub, text
from .._retry import Backoff
from .._views import Metrics
from .api import Api

SIGTERM = 15
MIN_INTERVAL, MAX_INTERVAL = 0.1, 3600.0


@dataclass(frozen=True)
class Process:
    """A process in a sandbox, as it was when it was listed. What it calls itself is its own word.

    Attributes:
        pid: inside.
        uid: effective, inside.
        argv: shortened to 1 KiB together; invalid UTF-8 is replaced.
        state: the letter of proc(5), for example ``"R"``, ``"S"``, ``"Z"``.
        memory_bytes: resident.
        started_ticks: since the machine's start; with ``pid`` it names a process for good.
        command_id: the command whose process tree it is of, ``""`` where that is not known.
        threads: how many.
    """

    pid: int
    parent: int
    uid: int
    name: str
    argv: tuple[str, ...]
    state: str
    cpu_seconds: float
    memory_bytes: int
    started_ticks: int
    command_id: str
    threads: int
    _sandbox: Views = field(repr=False, compare=False)

    async def signal(self, signal: int = SIGTERM) -> None:
        """Send ``signal`` to this process and no other; see ``Sandbox.signal_process``.

        Raises:
            NotFoundError: it has ended, whoever has its number now (``process_not_found``).
        """
        await self._sandbox.signal_process(self.pid, signal, started_ticks=self.started_ticks)


class Views:
    """The part of ``Sandbox`` that looks at it from outside."""

    _api: Api

    @property
    def id(self) -> str:
        """Its name for ever."""
        raise NotImplementedError

    async def metrics(self) -> Metrics:
        """Measure the sandbox now and return the figures. To look at it is no activity of it."""
        return _metrics(await self._api.call("GetMetrics", {"sandboxId": self.id}))

    async def watch_metrics(self, interval: float = 1.0) -> AsyncGenerator[Metrics, None]:
        """Yield a measurement every ``interval`` seconds (0.1 to 3600), until the sandbox ends.

        A broken connection is made anew, for up to ``retry_seconds`` without any answer.
        """
        if not isinstance(interval, (int, float)) or isinstance(interval, bool) or not MIN_INTERVAL <= interval <= MAX_INTERVAL:
            raise invalid(
                f"interval must be {MIN_INTERVAL:g} to {MAX_INTERVAL:g} seconds, not {interval!r}", "invalid_interval"
            )
        request = {"sandboxId": self.id, "intervalSeconds": interval}
        backoff = Backoff(self._api.config.retry_seconds, None, net.monotonic)
        begun = False
        while True:
            try:
                stream = self._api.server_stream(
                    "WatchMetrics", request, wait=0.0, stall=interval + self._api.config.stall_timeout
                )
                async with aclosing(stream) as messages:
                    async for message in messages:
                        begun = True
                        backoff.progress()
                        yield _metrics(message)
                return
            except FailedPreconditionError as e:
                if begun and e.reason == "sandbox_ended":
                    return
                raise
            except DSecError as e:
                pause = backoff.delay(e)
            await net.sleep(pause)

    async def list_processes(self) -> list[Process]:
        """Return the processes in the sandbox, ascending by pid, at most 10,000. The platform's own is not among them."""
        answer = await self._api.call("ListProcesses", {"sandboxId": self.id})
        return [self._process(sub({"": p}, "")) for p in items(answer, "processes")]

    async def signal_process(self, pid: int, signal: int = SIGTERM, *, started_ticks: int = 0) -> None:
        """Signal one process.

        A signal is sent once: after UnavailableError or DSecTimeoutError it may have arrived, or not.

        Args:
            pid: inside.
            signal: 1 to 64, for example ``signal.SIGKILL``.
            started_ticks: of ``Process``: only if it is still that one. 0: whoever has the number now.

        Raises:
            NotFoundError: there is no such process (``process_not_found``).
        """
        request = {"sandboxId": self.id, "pid": int(pid), "signal": int(signal), "startedTicks": str(int(started_ticks))}
        await self._api.call("SignalProcess", request, once=True)

    def _process(self, m: Message) -> Process:
        return Process(
            pid=number(m, "pid"),
            parent=number(m, "parent"),
            uid=number(m, "uid"),
            name=text(m, "name"),
            argv=tuple(str(a) for a in items(m, "argv")),
            state=text(m, "state"),
            cpu_seconds=real(m, "cpuSeconds"),
            memory_bytes=number(m, "memoryBytes"),
            started_ticks=number(m, "startedTicks"),
            command_id=text(m, "commandId"),
            threads=number(m, "threads"),
            _sandbox=self,
        )


def _metrics(message: Message) -> Metrics:
    return Metrics.from_wire(sub(message, "metrics"))
