"""Connect's JSON: messages, errors and the envelopes of server streams."""

from __future__ import annotations

import json
from typing import Any

from ._errors import DSecError, InvalidArgumentError, error_from_code
from ._models import Message, bad_response

MAX_ENVELOPE = 16 << 20
_END_STREAM = 2

# What a status means when the answer is not Connect's own, for example from a proxy on the way.
_BY_STATUS = {
    400: "internal",
    401: "unauthenticated",
    403: "permission_denied",
    404: "unimplemented",
    408: "deadline_exceeded",
    413: "invalid_argument",
    416: "invalid_argument",
    429: "resource_exhausted",
    431: "invalid_argument",
    501: "unimplemented",
    502: "unavailable",
    503: "unavailable",
    504: "unavailable",
    507: "resource_exhausted",
}

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encode(message: Message) -> bytes:
    """Return a message as JSON. Text with lone surrogates cannot travel and is an InvalidArgumentError."""
    try:
        return _encode(message).encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            "a text argument is not valid Unicode (it holds a lone surrogate); pass such bytes by stdin or in a file",
            reason="invalid_text",
        ) from None


def decode(data: bytes) -> dict[str, Any]:
    """Read a JSON object; anything else is an InternalError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise bad_response("it is not JSON") from None
    if not isinstance(value, dict):
        raise bad_response("it is not a JSON object")
    return value


def error_from_body(status: int, body: bytes) -> DSecError:
    """Make the exception for an answer with an error status, whoever wrote it."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and isinstance(value.get("code"), str):
        return error_from_message(value)
    code = _BY_STATUS.get(status, "unavailable" if status >= 500 else "internal")
    return error_from_code(code, f"the server answered with HTTP status {status}", reason=f"http_{status}")


def error_from_message(message: Message) -> DSecError:
    """Make the exception for a Connect error: ``{"code", "message", "details": [{"type", "debug"}]}``."""
    info: Message = {}
    details = message.get("details")
    for detail in details if isinstance(details, list) else []:
        if isinstance(detail, dict) and str(detail.get("type", "")).endswith("dsec.v1.ErrorInfo"):
            debug = detail.get("debug")
            info = debug if isinstance(debug, dict) else {}
            break
    return _error(message.get("code"), message.get("message"), info)


def error_from_failure(failure: Message) -> DSecError:
    """Make the exception for dsec.v1.Failure, an error inside a stream of results."""
    info = failure.get("info")
    return _error(failure.get("code"), failure.get("message"), info if isinstance(info, dict) else {})


def _error(code: object, message: object, info: Message) -> DSecError:
    facts = info.get("facts")
    return error_from_code(
        str(code or "internal"),
        str(message or ""),
        reason=str(info.get("reason") or ""),
        facts={str(k): str(v) for k, v in facts.items()} if isinstance(facts, dict) else None,
        sandbox_id=str(info["sandboxId"]) if info.get("sandboxId") else None,
    )


def envelope(payload: bytes) -> bytes:
    """Wrap one message of a stream."""
    return b"\0" + len(payload).to_bytes(4, "big") + payload


class EnvelopeDecoder:
    """Cuts the body of a server stream into messages.

    ``ended`` becomes true with the end-of-stream frame; a stream without one was cut. That frame may
    carry an error, which ``check`` raises: the messages before it are good.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._error: DSecError | None = None
        self.ended = False

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take bytes as they come, return the messages that are complete."""
        self._buffer += data
        messages = []
        while not self.ended and len(self._buffer) >= 5:
            size = int.from_bytes(self._buffer[1:5], "big")
            flags = self._buffer[0]
            if size > MAX_ENVELOPE:
                raise bad_response(f"a frame of {size} bytes in a stream")
            if len(self._buffer) < 5 + size:
                break
            payload = bytes(self._buffer[5 : 5 + size])
            del self._buffer[: 5 + size]
            if flags == _END_STREAM:
                self.ended = True
                error = decode(payload).get("error")
                if isinstance(error, dict):
                    self._error = error_from_message(error)
            elif flags == 0:
                messages.append(decode(payload))
            else:
                raise bad_response(f"a frame with the flags {flags} in a stream")
        return messages

    def check(self) -> None:
        """Raise the error that the end of the stream carried, if it did."""
        if self._error is not None:
            raise self._error
