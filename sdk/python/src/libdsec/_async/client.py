"""The client: sandboxes are made, found and listed here."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from functools import partial
from typing import Any, Union

from .. import _aio as net
from .. import _guard
from .._args import DSecContainerRunArgs, invalid, positive, string_map
from .._config import DSecConfig
from .._errors import (
    CanceledError,
    DSecError,
    DSecTimeoutError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from .._models import SandboxInfo, State, SystemInfo, bad_response, items, number, sub, text
from .._wire import error_from_failure
from .api import Api
from .command import Command, new_id
from .networks import Services
from .sandbox import Sandbox
from .watch import Completed, Watch, as_completed, watch_request

DEFAULT_CREATE_TIMEOUT = 120.0
CREATE_GRACE = 10.0  # seconds between the platform's deadline for a create and ours
MAX_COUNT = 100_000
CONCURRENT_CREATES = 128
CONCURRENT_STOPS = 32
SAME_KEY_DELAYS = (0.1, 0.5)

RunResult = Union[Sandbox, DSecError]
"""What ``run_containers`` yields; ``index`` says for which of the requests."""


class _Batch:
    """Creates that belong together: once cancelled, none of them is tried again.

    Attributes:
        key: of the batch; request ``i`` has ``key/i``.
        missing: requests whose result the caller has not got.
    """

    def __init__(self, key: str, count: int) -> None:
        self.key = key
        self.missing = set(range(count))
        self.cancelled = False
        self.lock = net.Lock()
        self.pid = os.getpid()

    def give_up(self) -> list[str]:
        """Return the keys of what is to be undone, once."""
        self.cancelled = True
        missing, self.missing = self.missing, set()
        return [f"{self.key}/{i}" for i in sorted(missing)]


class DSecClient:
    """A client of one platform.

    Where it is comes from the arguments, else from ``DSEC_URL`` and ``DSEC_API_KEY``, else from ``DSEC_CONTEXT`` or the
    current context in ``~/.config/dsec/config.json``; see ``DSecConfig.load``.

    **Who ends the sandboxes?** ``Sandbox.stop``, or leaving ``async with`` on the sandbox, or their times to live. Beyond
    that, sandboxes that this client made and that were not stopped are stopped when its own ``async with`` block is left
    by an exception (cancellation and Ctrl-C included), and when the interpreter ends by an unhandled exception or Ctrl-C.
    ``Sandbox.detach`` exempts one. A process that ends in order, ``sys.exit(0)`` included, leaves them running.

    Attributes:
        services: what network rules may name.

    Args:
        url: ``http://host:port``, ``https://…`` or ``unix:///path``.
        api_key: bearer token.
        config: everything else; replaces environment and file.

    Raises:
        InvalidArgumentError: URL or configuration file cannot be used.
        FailedPreconditionError: nothing says where the platform is (``not_configured``).
        NotFoundError: the file has no such context.
        AuthenticationError: there is no key for the URL, or it holds characters that no key has.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, config: DSecConfig | None = None) -> None:
        if config is None:
            config = DSecConfig.load(url, api_key)
        elif url is not None or api_key is not None:
            raise invalid("give url and api_key, or config, not both")
        self.config = config
        self._api = Api(config)
        self.services = Services(self._api)
        self._owned = _guard.Owned(config)
        self._batches: set[_Batch] = set()

    def __repr__(self) -> str:
        return f"<DSecClient {self.config.url}>"

    async def open(self) -> DSecClient:
        """Connect, check the key and return the client. Optional: the first request connects as well.

        Raises:
            UnavailableError: the platform cannot be reached.
            AuthenticationError: it does not accept the key.
        """
        try:
            await self.system_info()
        except (UnsupportedError, NotFoundError):
            pass  # a platform that does not tell; the next request will
        except BaseException:
            self._api.http.drop_idle()
            raise
        return self

    async def close(self) -> None:
        """Close the connections. Sandboxes stay as they are. Closing twice is no error.

        What ``run_containers`` has not yielded yet is removed before.
        """
        # A loop that was left does not close its iterator at once: that comes some time later, or at the event loop's end.
        for batch in list(self._batches):
            await self._give_up(batch)
        self._api.close()
        self._owned.release()

    async def system_info(self) -> SystemInfo:
        """Return the platform's version and nodes, and who the caller is to it."""
        return SystemInfo.from_wire(await self._api.call("GetInfo", {}, service="SystemService"))

    async def run_container(
        self,
        args: DSecContainerRunArgs,
        *,
        timeout: float = DEFAULT_CREATE_TIMEOUT,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Create a container sandbox and return when it is ready.

        If the caller is cancelled or interrupted meanwhile, or the time is over, the sandbox is removed.

        Args:
            args: what it shall be.
            timeout: seconds until it must be ready.
            idempotency_key: creating twice with one key gives the same sandbox. None: a fresh one. With a key of the
                caller's own libdsec removes nothing by it, since the sandbox may have existed before: after a failure
                that leaves open whether there is one, the same call finds it.

        Raises:
            InvalidArgumentError: before any request where that can be told.
            NotFoundError: no such image, workspace or toolkit (``environment_not_found``), or network service
                (``unknown_network_service``).
            ResourceExhaustedError: no capacity, or the quota is used up; may succeed later.
            DSecTimeoutError: it was not ready in time.
            AlreadyExistsError: the key was used with other arguments (``idempotency_key_reused``).
            UnsupportedError: the platform cannot grant what was asked for, for example a limit of inodes.
            UnavailableError: the platform cannot be reached.
        """
        positive("timeout", timeout)
        spec = self._spec(args)
        if idempotency_key:
            return await self._create_named(spec, idempotency_key, timeout)
        return await self._create(spec, new_id(), timeout)

    async def run_containers(
        self,
        args: DSecContainerRunArgs | Iterable[DSecContainerRunArgs],
        count: int | None = None,
        *,
        timeout: float = DEFAULT_CREATE_TIMEOUT,
    ) -> AsyncGenerator[RunResult, None]:
        """Create many sandboxes and yield each as it becomes ready, or the error that it failed with.

        One failure does not end the others. What was not yielded when the iterator is closed, cancelled or
        interrupted, or the client is closed, is removed. A loop that is left by ``break`` or an exception closes its
        iterator only some time later; for at once, see ``contextlib.aclosing``.

        Args:
            args: one description, with ``count``; or a sequence of them.
            count: how many of one description, at most 100,000.
            timeout: seconds until each must be ready.

        Yields:
            A Sandbox or a DSecError, in the order of their completion; ``index`` counts the requests from 0.

        Raises:
            InvalidArgumentError, AuthenticationError, PermissionDeniedError, UnavailableError: nothing was created.
        """
        positive("timeout", timeout)
        key = new_id()
        if isinstance(args, DSecContainerRunArgs):
            if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MAX_COUNT:
                raise invalid(f"count must be a whole number between 1 and {MAX_COUNT}, not {count!r}")
            specs: Sequence[dict[str, Any]] = [self._spec(args)] * count
        else:
            if count is not None:
                raise invalid("count goes with one description, not with a sequence")
            specs = [self._spec(a) for a in args]
        batch = _Batch(key, len(specs))
        results = self._results(specs, count, timeout, batch)
        self._batches.add(batch)
        try:
            async for result in results:
                batch.missing.discard(result.index or 0)
                yield result
        except DSecError:
            batch.missing.clear()  # the platform refused the whole, or ended its stream: it knows what to undo
            raise
        finally:
            batch.cancelled = True
            try:
                await results.aclose()  # first, so that the platform itself undoes what it can
            finally:
                await self._give_up(batch)

    async def get_sandbox(self, sandbox_id: str) -> Sandbox:
        """Return a sandbox by its id, whoever created it.

        Args:
            sandbox_id: the whole id.

        Raises:
            NotFoundError: no such sandbox, or another project's.
        """
        answer = await self._api.call("GetSandbox", {"id": sandbox_id})
        return Sandbox(self, SandboxInfo.from_wire(sub(answer, "sandbox")))

    async def list_sandboxes(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        states: Iterable[State | str] | None = None,
        page_size: int = 500,
    ) -> AsyncIterator[Sandbox]:
        """Yield the project's sandboxes, page by page.

        Args:
            labels: all must match.
            states: None: creating, ready, stopping.
            page_size: how many are asked for at once, at most 1000.
        """
        string_map("labels", labels or {})
        try:
            wanted = [State(s).to_wire() for s in states or ()]
        except ValueError as e:
            raise invalid(f"{e}; states are {', '.join(s.value for s in State)}") from None
        request: dict[str, Any] = {"labels": dict(labels or {}), "states": wanted, "pageSize": page_size}
        while True:
            answer = await self._api.call("ListSandboxes", request)
            for item in items(answer, "sandboxes"):
                yield Sandbox(self, SandboxInfo.from_wire(sub({"": item}, "")))
            token = text(answer, "nextPageToken")
            if not token:
                return
            request["pageToken"] = token

    def watch(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        ids: Iterable[str] | None = None,
        commands: bool = False,
        since: datetime | None = None,
    ) -> Watch:
        """Watch many sandboxes over one connection: their states, and with ``commands`` the ends of their commands.

            async with client.watch(labels={"run": "7"}, commands=True) as events:
                async for event in events:
                    if isinstance(event, CommandEndedEvent):
                        print(event.sandbox_id, event.result.exit_code)

        First come the present states of all that match, then ``Synced``, then what happens. See ``Watch``.

        Args:
            labels: all must match.
            ids: of sandboxes, at most 100,000. None: all of the project, those made later included.
            commands: also ends of commands.
            since: with ``commands``: ends from then on come first, a datetime with a time zone. None: none of the past.

        Returns:
            A Watch, whose events are SandboxEvent, CommandEndedEvent, Synced and EdgeLost.
        """
        if since is not None and (not isinstance(since, datetime) or since.tzinfo is None):
            raise invalid("since must be a datetime with a time zone")
        return Watch(self._api, watch_request(labels, ids, commands=commands), since)

    async def as_completed(self, commands: Iterable[Command], *, output: bool = True) -> AsyncGenerator[Completed, None]:
        """Yield commands, of any number of sandboxes, as they end; all are waited for over one connection.

            commands = [await sandbox.start("make test") for sandbox in sandboxes]
            async for command, result in client.as_completed(commands):
                print(command.sandbox_id, result)

        Leaving the loop leaves the commands running.

        Args:
            commands: handles, of ``Sandbox.start``, ``command`` or ``attach``, of at most 100,000 sandboxes.
            output: fetch what was kept of the output, by one request each. False: results without.

        Yields:
            The command, and its CommandResult, or the DSecError that says why there is none: its sandbox ended before it, or
            the platform does not know it.

        Raises:
            UnavailableError: there was no answer for ``retry_seconds``.
        """
        async with aclosing(as_completed(self._api, commands, output=output)) as completed:
            async for item in completed:
                yield item

    async def __aenter__(self) -> DSecClient:
        return await self.open()

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, _: object) -> None:
        in_order = exc_type is None or (isinstance(exc, SystemExit) and exc.code in (None, 0))
        try:
            for batch in list(self._batches):
                await self._give_up(batch)
            if not in_order and self._owned.ids:
                await net.shielded(self._stop_owned, self.config.cleanup_seconds)
        finally:
            await self.close()

    # What follows is for Sandbox and for the methods above.

    def _spec(self, args: DSecContainerRunArgs) -> dict[str, Any]:
        if not isinstance(args, DSecContainerRunArgs):
            raise invalid(f"args must be DSecContainerRunArgs, not {type(args).__name__}")
        return {"backend": "container", **args.to_spec()}

    def _adopt(self, message: Mapping[str, Any]) -> Sandbox:
        info = SandboxInfo.from_wire(message)
        if not info.id:
            raise bad_response("a sandbox without an id")
        self._owned.add(info.id)
        return Sandbox(self, info)

    def _forget(self, sandbox_id: str) -> None:
        self._owned.discard(sandbox_id)

    async def _create(self, spec: dict[str, Any], key: str, timeout: float, batch: _Batch | None = None) -> Sandbox:
        """Create one sandbox; whatever goes wrong, none is left behind that the caller does not know of.

        Interrupted, one of a batch leaves its clean-up to the batch.
        """
        ready_by = net.monotonic() + timeout
        name = key
        for attempt in range(1, 4):
            try:
                return await self._create_once(spec, name, ready_by)
            except CanceledError as e:
                # The platform undoes a create whose connection breaks. The repetition may find it undone.
                if (batch is not None and batch.cancelled) or e.attempts == 1 or attempt == 3:
                    raise
                if net.monotonic() >= ready_by:
                    raise _too_late(timeout) from e
            except (UnavailableError, DSecTimeoutError):
                if batch is None or not batch.cancelled:
                    cancel = partial(self._cancel_create, name, retry=False)  # the platform was waited for long enough
                    await net.shielded(cancel, self.config.cleanup_seconds)
                raise
            except net.INTERRUPTS:
                if batch is None:
                    await net.shielded(partial(self._cancel_create, name), self.config.cleanup_seconds)
                raise
            name = f"{key}.{attempt}"
        raise AssertionError("unreachable")

    async def _create_named(self, spec: dict[str, Any], key: str, timeout: float) -> Sandbox:
        """Create one sandbox, or find the one that has the caller's own key."""
        ready_by = net.monotonic() + timeout
        for pause in (*SAME_KEY_DELAYS, None):
            try:
                return await self._create_once(spec, key, ready_by)
            except CanceledError as e:
                if e.attempts == 1 or pause is None:
                    raise
                if net.monotonic() + pause >= ready_by:
                    raise _too_late(timeout) from e
            await net.sleep(pause)
        raise AssertionError("unreachable")

    async def _create_once(self, spec: dict[str, Any], key: str, ready_by: float) -> Sandbox:
        left = max(ready_by - net.monotonic(), 0.1)
        request = {"spec": spec, "idempotencyKey": key, "timeoutSeconds": str(math.ceil(left))}
        answer = await self._api.call("CreateSandbox", request, wait=left, deadline=ready_by + CREATE_GRACE)
        return self._adopt(sub(answer, "sandbox"))

    async def _results(
        self, specs: Sequence[dict[str, Any]], count: int | None, timeout: float, batch: _Batch
    ) -> AsyncGenerator[RunResult, None]:
        """Yield the results of a batch: from one request if ``count`` is given, then one by one for what is missing."""
        if count is not None:
            async with aclosing(self._stream(specs[0], count, batch.key, timeout)) as results:
                async for result in results:
                    if result.index in batch.missing:
                        yield result
        jobs = [self._job(specs[i], i, timeout, batch) for i in sorted(batch.missing)]
        async with aclosing(net.as_completed(jobs, CONCURRENT_CREATES)) as results:
            async for result in results:
                yield result

    def _job(self, spec: dict[str, Any], index: int, timeout: float, batch: _Batch) -> Callable[[], Any]:
        """Return a create whose failure is its result."""

        async def job() -> RunResult:
            result: RunResult
            try:
                if batch.cancelled:
                    raise CanceledError("the batch was cancelled", reason="canceled")
                result = await self._create(spec, f"{batch.key}/{index}", timeout, batch)
            except DSecError as e:
                result = e
            result.index = index
            return result

        return job

    async def _stream(self, spec: dict[str, Any], count: int, key: str, timeout: float) -> AsyncGenerator[RunResult, None]:
        """Yield the results of one request for many. Ends early, without an error, if the connection breaks."""
        request = {
            "spec": spec,
            "count": count,
            "idempotencyKey": key,
            "timeoutSeconds": str(math.ceil(timeout)),
        }
        begun = False
        try:
            async with aclosing(self._api.server_stream("CreateSandboxes", request, wait=timeout)) as messages:
                async for message in messages:
                    begun = True
                    result = self._result(message)
                    result.index = number(message, "index")
                    yield result
        except (UnavailableError, DSecTimeoutError) as e:
            net.log.info(
                "the stream of creates broke, going on one by one: %s (%s)",
                e,
                "begun" if begun else "not begun",
            )

    def _result(self, message: Mapping[str, Any]) -> RunResult:
        if message.get("sandbox"):
            return self._adopt(sub(message, "sandbox"))
        return error_from_failure(sub(message, "failure"))

    async def _give_up(self, batch: _Batch) -> None:
        """Remove what was created, or is being created, in a batch and was not handed out. Returns when that is done."""
        try:
            if batch.pid == os.getpid():  # else it is a fork's copy, and the sandboxes are the parent's
                await net.shielded(partial(self._undo, batch), self.config.cleanup_seconds)
        finally:
            self._batches.discard(batch)

    async def _undo(self, batch: _Batch, until: float) -> None:
        async with batch.lock:  # whoever comes second waits for the first
            jobs = [partial(self._quietly, self._cancel_create, key, until) for key in batch.give_up()]
            await self._all(jobs, "creates could not be cancelled")

    async def _stop_owned(self, until: float) -> None:
        """Stop what this client made and nobody stopped."""
        jobs = [partial(self._quietly, self._stop, sandbox_id, until) for sandbox_id in self._owned.ids]
        await self._all(jobs, "sandboxes could not be stopped")

    async def _all(self, jobs: Sequence[Callable[[], Any]], failure: str) -> None:
        errors: list[DSecError] = []
        async with aclosing(net.as_completed(jobs, CONCURRENT_STOPS)) as results:
            async for error in results:
                if error is not None:
                    errors.append(error)
        if errors:
            net.log.warning("%d %s, and are left to their times to live: %s", len(errors), failure, errors[0])

    async def _cancel_create(self, key: str, until: float, *, retry: bool = True) -> None:
        """Remove what was created, or is being created, with a key.

        Once is enough, also where the create is still on its way on another connection: the platform remembers the key.
        """
        try:
            await self._api.call("DeleteSandbox", {"idempotencyKey": key}, urgent=True, retry=retry, until=until)
        except NotFoundError:
            pass

    async def _stop(self, sandbox_id: str, until: float) -> None:
        request = {"id": sandbox_id, "wait": True}
        try:
            await self._api.call("DeleteSandbox", request, wait=self.config.cleanup_seconds, urgent=True, until=until)
        except NotFoundError:
            pass
        self._forget(sandbox_id)

    async def _quietly(self, job: Callable[[str, float], Any], name: str, until: float) -> DSecError | None:
        try:
            await job(name, until)
        except DSecError as e:
            return e
        return None


def _too_late(timeout: float) -> DSecTimeoutError:
    return DSecTimeoutError(f"the sandbox was not ready within {timeout:g} s, and was removed", reason="create_timeout")
