"""One tree of exceptions.

Every failure that libdsec raises on purpose is a :class:`DSecError`. Its ``code`` is the class of the failure, its
``reason`` a stable snake_case word for programs; the text is for people and says what happened, why, and what to do.
Where Python has a fitting built-in (``ValueError``, ``TimeoutError``, ``ConnectionError``), the class inherits from it as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ._models import CommandResult


class DSecError(Exception):
    """Base of all errors of libdsec.

    Attributes:
        code: Class of the failure, for example ``"resource_exhausted"``.
        reason: Stable snake_case word, for example ``"environment_not_found"``; ``""`` if there is none.
        message: What happened, why, and what to do.
        facts: Numbers and names that belong to it, for example ``{"limit_bytes": "1048576"}``.
        sandbox_id: The sandbox concerned, or None.
        attempts: How often it was tried; more than 1 if connections broke or the platform was away.
        index: Position in the request where it is a result of ``run_containers``, else None.
    """

    default_code: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        code: str | None = None,
        facts: Mapping[str, str] | None = None,
        sandbox_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.code = code or self.default_code
        self.facts: dict[str, str] = dict(facts or {})
        self.sandbox_id = sandbox_id
        self.attempts = 1
        self.index: int | None = None

    def __str__(self) -> str:
        return f"{self.message} [{self.code}: {self.reason}]" if self.reason else f"{self.message} [{self.code}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


@contextmanager
def about(sandbox_id: str) -> Iterator[None]:
    """Say in the errors of a block which sandbox they concern, if they do not say so."""
    try:
        yield
    except DSecError as e:
        if e.sandbox_id is None:
            e.sandbox_id = sandbox_id
        raise


def _rebuild(cls: type[DSecError], message: str, state: dict[str, Any]) -> DSecError:
    """Unpickle an error: the constructor's keyword arguments are in its state."""
    error = cls.__new__(cls)
    DSecError.__init__(error, message)
    error.__dict__.update(state)
    return error


class InvalidArgumentError(DSecError, ValueError):
    """The request can never succeed as it is. Raised before any request where libdsec can tell."""

    default_code = "invalid_argument"


class AuthenticationError(DSecError):
    """There is no API key, or the platform does not accept it."""

    default_code = "unauthenticated"


class PermissionDeniedError(DSecError):
    """The key is known, but may not do this."""

    default_code = "permission_denied"


class NotFoundError(DSecError):
    """No such thing; things of other projects answer the same."""

    default_code = "not_found"


class AlreadyExistsError(DSecError):
    """A name or an idempotency key is taken."""

    default_code = "already_exists"


class FailedPreconditionError(DSecError):
    """The thing is in the wrong state, for example a sandbox that has ended."""

    default_code = "failed_precondition"


class ResourceExhaustedError(DSecError):
    """Capacity, quota or a limit; the same request may succeed later. ``facts`` says what was short."""

    default_code = "resource_exhausted"


class DSecTimeoutError(DSecError, TimeoutError):
    """An operation took longer than allowed. A command that runs out of time is no error: see ``CommandResult.timed_out``."""

    default_code = "deadline_exceeded"


class CanceledError(DSecError):
    """The platform ended the operation because somebody cancelled it (not this task: that is asyncio.CancelledError)."""

    default_code = "canceled"


class UnavailableError(DSecError, ConnectionError):
    """The platform, or a part of it, cannot be reached. What is safe to repeat has been repeated before this is raised."""

    default_code = "unavailable"


class UnsupportedError(DSecError):
    """This host or this version cannot do it."""

    default_code = "unimplemented"


class DataLossError(DSecError):
    """Something stored is damaged, or content does not match its digest or length."""

    default_code = "data_loss"


class InternalError(DSecError):
    """A fault of the platform or of libdsec."""

    default_code = "internal"


class CommandFailedError(DSecError):
    """A command that was run with ``check=True`` did not exit with 0. ``result`` has all of it."""

    default_code = "command_failed"

    def __init__(self, message: str, *, result: CommandResult, sandbox_id: str | None = None) -> None:
        super().__init__(message, reason="command_failed", sandbox_id=sandbox_id)
        self.result = result


_BY_CODE: dict[str, type[DSecError]] = {
    cls.default_code: cls
    for cls in (
        InvalidArgumentError,
        AuthenticationError,
        PermissionDeniedError,
        NotFoundError,
        AlreadyExistsError,
        FailedPreconditionError,
        ResourceExhaustedError,
        DSecTimeoutError,
        CanceledError,
        UnavailableError,
        UnsupportedError,
        DataLossError,
        InternalError,
    )
}
_BY_CODE["out_of_range"] = InvalidArgumentError
_BY_CODE["aborted"] = FailedPreconditionError


def error_from_code(
    code: str,
    message: str,
    *,
    reason: str = "",
    facts: Mapping[str, str] | None = None,
    sandbox_id: str | None = None,
) -> DSecError:
    """Make the exception for a code on the wire. Codes that this version does not know are InternalError."""
    cls = _BY_CODE.get(code, InternalError)
    return cls(message or code, reason=reason, code=code, facts=facts, sandbox_id=sandbox_id)
