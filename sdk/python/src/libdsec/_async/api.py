"""Calls of the public API: Connect's JSON for messages, plain HTTP for bytes, repeated while that may help."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from .. import _aio as net
from .._config import DSecConfig
from .._errors import DSecError, DSecTimeoutError, UnavailableError
from .._models import Message, bad_response
from .._retry import CONNECT_FAILED, NO_ANSWER, TOO_MANY_REQUESTS, Backoff
from .._wire import EnvelopeDecoder, decode, encode, envelope, error_from_body
from .http import BodyFactory, HttpClient, Response

MAX_ERROR_BODY = 1 << 20
CROWDED_POLL = 1.0


class Api:
    """One platform. All methods may be used at the same time."""

    def __init__(self, config: DSecConfig) -> None:
        self.config = config
        self.http = HttpClient(config)

    async def call(
        self,
        method: str,
        message: Message,
        *,
        wait: float = 0.0,
        deadline: float | None = None,
        urgent: bool = False,
        patient: bool = False,
        retry: bool = True,
        once: bool = False,
        until: float | None = None,
        service: str = "SandboxService",
    ) -> dict[str, Any]:
        """Make a unary call.

        Args:
            method: name of the procedure.
            message: its request.
            wait: seconds that the platform may take by itself, beyond ``request_timeout``.
            deadline: after which no further attempt is made.
            urgent: does not wait for a free connection; for what ends things.
            patient: waits for a free connection as long as it takes.
            retry: repeat while the platform is away. Calls must be safe to repeat anyway: a kept connection that
                turns out to be dead is always replaced.
            once: not safe to repeat: repeated only where no connection could be made.
            until: on the clock, when all attempts must be over; for clean-up.
            service: of dsec.v1.
        """
        target = f"/dsec.v1.{service}/{method}"
        body = encode(message)
        backoff: Backoff | None = None
        while True:
            try:
                if until is not None and net.monotonic() >= until:
                    raise DSecTimeoutError(f"no time was left for {method}", reason=NO_ANSWER)
                status, data = await self.http.unary(
                    target, body, wait=wait, urgent=urgent, patient=patient, once=once, until=until
                )
                if status == 200:
                    return decode(data)
                raise error_from_body(status, data)
            except DSecError as e:
                if not retry or (once and e.reason not in (CONNECT_FAILED, TOO_MANY_REQUESTS)):
                    raise
                if backoff is None:
                    backoff = Backoff(self.config.retry_seconds, until or deadline, net.monotonic)
                pause = backoff.delay(e)
            await net.sleep(pause)

    async def server_stream(
        self, method: str, message: Message, *, wait: float, stall: float | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Call a server-streaming procedure once and yield its messages.

        Args:
            method, message: as in ``call``.
            wait: seconds that the platform may take to begin, beyond ``request_timeout``.
            stall: longest pause in the stream, instead of ``stall_timeout``.

        Raises:
            UnavailableError: the stream was cut (reason ``connection_lost``, ``stream_cut``).
        """
        payload = envelope(encode(message))

        async def body() -> AsyncIterator[bytes]:
            yield payload

        response = await self.http.stream(
            "POST",
            f"/dsec.v1.SandboxService/{method}",
            headers={"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"},
            body=body,
            length=len(payload),
            wait=wait,
            stall=stall,
        )
        try:
            await self._check(response)
            # A gateway's error may come as plain JSON with status 200: its first bytes must not be read as a length.
            if not response.head.headers.get("content-type", "").startswith("application/connect+json"):
                raise bad_response("a stream of another type")
            decoder = EnvelopeDecoder()
            while not decoder.ended:
                piece = await response.read()
                if not piece:
                    raise UnavailableError("the stream of results ended in the middle", reason="stream_cut")
                for item in decoder.feed(piece):
                    yield item
            decoder.check()
            await response.read()  # the end of the body: the connection can be kept
        finally:
            response.close()

    async def bytes_request(
        self,
        method: str,
        target: str,
        *,
        headers: dict[str, str] | None = None,
        body: BodyFactory | None = None,
        length: int | None = 0,
        wait: float = 0.0,
        once: bool = False,
        stall: float | None = None,
    ) -> Response:
        """Make one attempt on a byte route and return its answer, whose status is 2xx."""
        response = await self.http.stream(
            method, target, headers=headers, body=body, length=length, wait=wait, once=once, stall=stall
        )
        try:
            await self._check(response)
        except BaseException:
            response.close()
            raise
        return response

    async def _check(self, response: Response) -> None:
        if not 200 <= response.status < 300:
            raise error_from_body(response.status, await response.read_all(MAX_ERROR_BODY))

    @property
    def poll_seconds(self) -> float:
        """How long one request waits for the end of a command: briefly where others wait for its connection."""
        poll = self.config.command_poll_seconds
        return min(poll, CROWDED_POLL) if self.http.crowded else poll

    def close(self) -> None:
        """Close kept connections."""
        self.http.close()
