"""The client: sandboxes are made, found and listed here."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
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
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from .._models import SandboxInfo, State, SystemInfo, bad_response, items, number, sub, text
from .._wire import error_from_failure
from .api import Api
from .command import new_id
from .sandbox import Sandbox

DEFAULT_CREATE_TIMEOUT = 120.0
CREATE_GRACE = 10.0  # seconds between the platform's deadline for a create and ours
MAX_COUNT = 100_000
CONCURRENT_CREATES = 128
CONCURRENT_STOPS = 32
CANCEL_DELAYS = (0.1, 0.5)

RunResult = Union[Sandbox, DSecError]
"""What ``run_containers`` yields; ``index`` says for which of the requests."""


class _Batch:
    """Creates that belong together: once cancelled, none of them is tried again."""

    def __init__(self) -> None:
        self.cancelled = False


class DSecClient:
    """A client of one platform.

    Where it is comes from the arguments, else from ``DSEC_URL`` and ``DSEC_API_KEY``, else from the current context of
    ``~/.config/dsec/config.json``, else it is ``http://127.0.0.1:7070``.

    **Who ends the sandboxes?** ``Sandbox.stop``, or leaving ``async with`` on the sandbox, or their times to live. Beyond
    that, sandboxes that this client made and that were not stopped are stopped when its own ``async with`` block is left
    by an exception (cancellation and Ctrl-C included), and when the interpreter ends by an unhandled exception or Ctrl-C.
    ``Sandbox.detach`` exempts one. A process that ends in order leaves them running.

    Args:
        url: ``http://host:port``, ``https://…`` or ``unix:///path``.
        api_key: bearer token.
        config: everything else; replaces environment and file.

    Raises:
        InvalidArgumentError: URL or configuration file cannot be used.
        AuthenticationError: the key holds characters that no key has.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, config: DSecConfig | None = None) -> None:
        if config is None:
            config = DSecConfig.load(url, api_key)
        elif url is not None or api_key is not None:
            raise invalid("give url and api_key, or config, not both")
        self.config = config
        self._api = Api(config)
        self._owned = _guard.Owned(config)

    def __repr__(self) -> str:
        return f"<DSecClient {self.config.url}>"

    async def open(self) -> DSecClient:
        """Connect, and check the key. Optional: the first request connects as well.

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
        """Close the connections. Sandboxes stay as they are. Closing twice is no error."""
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
            idempotency_key: creating twice with one key gives the same sandbox. None: a fresh one.

        Raises:
            InvalidArgumentError: before any request where that can be told.
            NotFoundError: no such image, workspace or toolkit (``environment_not_found``).
            ResourceExhaustedError: no capacity, or the quota is used up; may succeed later.
            DSecTimeoutError: it was not ready in time.
            AlreadyExistsError: the key was used with other arguments (``idempotency_key_reused``).
            UnsupportedError: the platform cannot grant what was asked for, for example a network service.
            UnavailableError: the platform cannot be reached.
        """
        positive("timeout", timeout)
        spec = self._spec(args)
        return await self._create(spec, idempotency_key or new_id(), timeout, _Batch())

    async def run_containers(
        self,
        args: DSecContainerRunArgs | Iterable[DSecContainerRunArgs],
        count: int | None = None,
        *,
        timeout: float = DEFAULT_CREATE_TIMEOUT,
    ) -> AsyncIterator[RunResult]:
        """Create many sandboxes and yield each as it becomes ready, or the error that it failed with.

        One failure does not end the others. What was not yielded when the iterator is closed, cancelled or
        interrupted, is removed.

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
            first = self._stream(specs[0], count, key, timeout)
        else:
            if count is not None:
                raise invalid("count goes with one description, not with a sequence")
            specs = [self._spec(a) for a in args]
            first = None
        missing = dict.fromkeys(range(len(specs)))
        batch = _Batch()
        try:
            if first is not None:
                async for result in first:
                    if result.index in missing:
                        del missing[result.index]
                        yield result
            jobs = [self._job(specs[i], key, i, timeout, batch) for i in missing]
            async for result in net.as_completed(jobs, CONCURRENT_CREATES):
                missing.pop(result.index or 0, None)
                yield result
        except DSecError:
            missing.clear()  # the platform refused the whole, or ended its stream: it knows what to undo
            raise
        finally:
            if missing:
                batch.cancelled = True
                rest = [f"{key}/{i}" for i in missing]
                await net.shielded(lambda: self._cancel_creates(rest), self.config.cleanup_seconds)

    async def get_sandbox(self, sandbox_id: str) -> Sandbox:
        """Return a sandbox by its id, whoever created it.

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

    async def __aenter__(self) -> DSecClient:
        return await self.open()

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is not None and self._owned.ids:
            await net.shielded(self._stop_owned, self.config.cleanup_seconds)
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

    async def _create(self, spec: dict[str, Any], key: str, timeout: float, batch: _Batch) -> Sandbox:
        """Create one sandbox; whatever goes wrong, none is left behind that the caller does not know of."""
        ready_by = net.monotonic() + timeout
        name = key
        for attempt in range(1, 4):
            left = max(ready_by - net.monotonic(), 0.1)
            request = {"spec": spec, "idempotencyKey": name, "timeoutSeconds": str(math.ceil(left))}
            try:
                answer = await self._api.call("CreateSandbox", request, wait=left, deadline=ready_by + CREATE_GRACE)
                return self._adopt(sub(answer, "sandbox"))
            except CanceledError as e:
                # The platform undoes a create whose connection breaks. The repetition may find it undone.
                if batch.cancelled or e.attempts == 1 or attempt == 3:
                    raise
                if net.monotonic() >= ready_by:
                    raise DSecTimeoutError(
                        f"the sandbox was not ready within {timeout:g} s, and was removed", reason="create_timeout"
                    ) from e
            except (UnavailableError, DSecTimeoutError):
                if not batch.cancelled:
                    await net.shielded(partial(self._cancel_create, name), self.config.cleanup_seconds)
                raise
            except net.INTERRUPTS:
                await net.shielded(partial(self._cancel_create, name), self.config.cleanup_seconds)
                raise
            name = f"{key}.{attempt}"
        raise AssertionError("unreachable")

    def _job(self, spec: dict[str, Any], key: str, index: int, timeout: float, batch: _Batch) -> Callable[[], Any]:
        """Return a create whose failure is its result."""

        async def job() -> RunResult:
            result: RunResult
            try:
                if batch.cancelled:
                    raise CanceledError("the batch was cancelled", reason="canceled")
                result = await self._create(spec, f"{key}/{index}", timeout, batch)
            except DSecError as e:
                result = e
            result.index = index
            return result

        return job

    async def _stream(self, spec: dict[str, Any], count: int, key: str, timeout: float) -> AsyncIterator[RunResult]:
        """Yield the results of one request for many. Ends early, without an error, if the connection breaks."""
        request = {
            "spec": spec,
            "count": count,
            "idempotencyKey": key,
            "timeoutSeconds": str(math.ceil(timeout)),
        }
        begun = False
        try:
            async for message in self._api.server_stream("CreateSandboxes", request, wait=timeout):
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

    async def _cancel_create(self, key: str) -> None:
        """Remove what was created, or is being created, with a key.

        Not found may mean that the create is still on its way on another connection, so it is tried again.
        """
        request = {"idempotencyKey": key}
        for delay in (*CANCEL_DELAYS, 0.0):
            try:
                await self._api.call("DeleteSandbox", request, urgent=True, retry=False)
            except (NotFoundError, FailedPreconditionError):
                if delay:
                    await net.sleep(delay)
            else:
                return

    async def _cancel_creates(self, keys: Sequence[str]) -> None:
        jobs = [partial(self._quietly, partial(self._cancel_create, key)) for key in keys]
        async for _ in net.as_completed(jobs, CONCURRENT_STOPS):
            pass

    async def _stop_owned(self) -> None:
        """Stop what this client made and nobody stopped."""
        jobs = [partial(self._quietly, partial(self._stop, sandbox_id)) for sandbox_id in self._owned.ids]
        async for _ in net.as_completed(jobs, CONCURRENT_STOPS):
            pass

    async def _stop(self, sandbox_id: str) -> None:
        request = {"id": sandbox_id, "wait": True}
        try:
            await self._api.call("DeleteSandbox", request, wait=self.config.cleanup_seconds, urgent=True)
        except NotFoundError:
            pass
        self._forget(sandbox_id)

    async def _quietly(self, job: Callable[[], Any]) -> None:
        try:
            await job()
        except DSecError as e:
            net.log.warning("clean-up failed: %s", e)
