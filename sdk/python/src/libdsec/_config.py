"""Where the platform is, and with which key: arguments, else environment, else the user's file.

The command line (``internal/config``) decides alike: both pass ``internal/config/testdata/cases.json``. A key is never
sent to a place it was not configured for: a stored key is used with its own URL only.
"""

from __future__ import annotations

import json
import math
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ._errors import AuthenticationError, FailedPreconditionError, InvalidArgumentError, NotFoundError

DEFAULT_URL = "http://127.0.0.1:7070"

_KEY = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True)
class Endpoint:
    """A parsed URL: TCP (``host``, ``port``), or a Unix socket (``unix_path``)."""

    host: str
    port: int
    tls: bool
    unix_path: str | None
    authority: str
    prefix: str

    @staticmethod
    def parse(url: str) -> Endpoint:
        """Parse ``http://``, ``https://`` and ``unix://`` URLs; anything else is an InvalidArgumentError."""
        bad = InvalidArgumentError(  # without the URL, which may hold a password
            "the platform's URL is not http://host[:port], https://host[:port] or unix:///path; check DSEC_URL or url=",
            reason="bad_url",
        )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise bad from None
        if parts.scheme == "unix":
            path = unquote(parts.path)
            if parts.netloc or not path.startswith("/") or "\0" in path:
                raise bad
            return Endpoint("", 0, False, path, "localhost", "")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
            raise bad
        if not re.fullmatch(r"[A-Za-z0-9._:%-]+", parts.hostname) or not re.fullmatch(r"[!-~]*", parts.path):
            raise bad
        tls = parts.scheme == "https"
        number = port if port is not None else (443 if tls else 80)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        authority = host if port is None else f"{host}:{number}"
        return Endpoint(parts.hostname, number, tls, None, authority, parts.path.rstrip("/"))


@dataclass
class DSecConfig:
    """Everything a client can be told. All times are seconds.

    Attributes:
        url: ``http://``, ``https://`` or ``unix:///path``.
        api_key: Sent as bearer token; never shown in ``repr`` and error texts.
        max_connections: Upper bound of open connections; a running command holds one. 0: 1000, or half of what the
            process may open if that is less. Killing, stopping and cancelling never wait for this bound.
        connect_timeout: For one connection to be made.
        request_timeout: For an answer to begin, in one attempt, beyond the time the request itself asks for.
        stall_timeout: Without any progress while bytes move, in either direction. There is no total time limit.
        retry_seconds: How long what is safe to repeat is repeated while the platform is away.
        command_poll_seconds: How long one request waits for the end of a command before the next one takes over.
        keep_alive_seconds: How long an unused connection is kept.
        cleanup_seconds: Bound of the clean-up after a cancellation or Ctrl-C.
        ssl_context: For ``https``; None: the system's trusted roots.
    """

    url: str = DEFAULT_URL
    api_key: str | None = field(default=None, repr=False)
    max_connections: int = 0
    connect_timeout: float = 10.0
    request_timeout: float = 30.0
    stall_timeout: float = 60.0
    retry_seconds: float = 15.0
    command_poll_seconds: float = 30.0
    keep_alive_seconds: float = 30.0
    cleanup_seconds: float = 10.0
    ssl_context: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        Endpoint.parse(self.url)
        if self.api_key is not None:
            _check_key(self.api_key)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith(("_timeout", "_seconds")) and not (_is_number(value) and 0 < value < math.inf):
                raise InvalidArgumentError(f"{f.name} must be a number greater than 0", reason="invalid_config")
        if self.max_connections < 0:
            raise InvalidArgumentError("max_connections must not be negative", reason="invalid_config")

    def connection_bound(self) -> int:
        """Return max_connections, with 0 resolved for this process."""
        return self.max_connections or min(1000, max(16, _open_files_limit() // 2))

    @staticmethod
    def load(
        url: str | None = None,
        api_key: str | None = None,
        *,
        context: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> DSecConfig:
        """Return a configuration with URL and key, found as the table "Which platform" of ARCHITECTURE.md says.

        Args:
            url, api_key: each instead of its variable, ``DSEC_URL`` and ``DSEC_API_KEY``.
            context: of the user's file, whatever the environment says; not with the other two.
            environ: None: os.environ.

        Raises:
            InvalidArgumentError: a URL is none (``bad_url``), the file cannot be used (``bad_config``), or ``DSEC_URL``
                and ``DSEC_CONTEXT`` name two platforms (``contradiction``).
            FailedPreconditionError: nothing says which platform (``not_configured``).
            NotFoundError: the file has no such context (``context_not_found``).
            AuthenticationError: there is no key for the URL (``no_api_key``), or it cannot be one (``invalid_api_key``).
        """
        env = os.environ if environ is None else environ
        if context:
            if url or api_key:
                raise InvalidArgumentError("give context, or url and api_key, not both", reason="invalid_argument")
            return _File.read(config_path(env)).context(context)
        url = url or env.get("DSEC_URL") or None
        api_key = api_key or env.get("DSEC_API_KEY") or None
        if url is not None:
            Endpoint.parse(url)
        if api_key is not None:
            _check_key(api_key)
        if url is not None and api_key is not None:
            return DSecConfig(url, api_key)
        file = _File.read(config_path(env))
        name = env.get("DSEC_CONTEXT") or None
        if url is None:
            return file.context(name, api_key) if name else file.current(api_key)
        if name is None:
            return file.at(url)
        found = file.context(name)
        if not _same_url(found.url, url):
            raise InvalidArgumentError(
                f"DSEC_URL is {url}, but the context DSEC_CONTEXT={name} is at {found.url}; unset one of the two",
                reason="contradiction",
            )
        return found


def config_path(environ: Mapping[str, str]) -> Path:
    """Return ``$DSEC_CONFIG``, else ``$XDG_CONFIG_HOME/dsec/config.json``, else ``~/.config/dsec/config.json``."""
    if environ.get("DSEC_CONFIG"):
        return Path(environ["DSEC_CONFIG"])
    if os.path.isabs(environ.get("XDG_CONFIG_HOME", "")):  # the XDG specification has relative paths ignored
        return Path(environ["XDG_CONFIG_HOME"]) / "dsec" / "config.json"
    if environ.get("HOME"):
        return Path(environ["HOME"]) / ".config" / "dsec" / "config.json"
    raise FailedPreconditionError(
        "there is no place for the configuration file: neither HOME nor XDG_CONFIG_HOME is set; set DSEC_CONFIG to a file",
        reason="no_config_path",
    )


class _File:
    """The user's file, which ``dsec up`` writes: platforms by name, one of which is the current one."""

    def __init__(self, path: Path, current: str, contexts: dict[str, tuple[str, str]]) -> None:
        self._path = path
        self._current = current
        self._contexts = contexts

    @staticmethod
    def read(path: Path) -> _File:
        """Read it; one that is not there is empty."""

        def bad(why: str) -> InvalidArgumentError:
            text = f"cannot use the configuration file {path}: {why}; mend it, or set DSEC_URL and DSEC_API_KEY"
            return InvalidArgumentError(text, reason="bad_config")

        try:
            data: Any = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            data = {}
        except OSError as e:
            text = f"cannot read the configuration file {path}: {e.strerror or e}; set DSEC_URL and DSEC_API_KEY instead"
            raise FailedPreconditionError(text, reason="unreadable_config") from e
        except (ValueError, RecursionError):
            raise bad("it is not JSON") from None
        if not isinstance(data, dict):
            raise bad("it is not a JSON object")
        current, contexts = data.get("current") or "", data.get("contexts") or {}
        if not isinstance(contexts, dict) or not isinstance(current, str):
            raise bad('it must hold "current", a name, and "contexts", an object')
        found: dict[str, tuple[str, str]] = {}
        for name, context in contexts.items():
            url, key = (context.get("url"), context.get("api_key") or "") if isinstance(context, dict) else (None, "")
            if not isinstance(url, str) or not isinstance(key, str):
                raise bad(f'context {name!r} must hold "url" and "api_key" as strings')
            try:
                Endpoint.parse(url)
            except InvalidArgumentError:
                raise bad(f"the URL of context {name!r} is not http://, https:// or unix:///") from None
            if key and not _KEY.fullmatch(key):
                raise bad(f"the api_key of context {name!r} holds characters that no key has")
            found[name] = (url, key)
        if current and current not in found:
            raise bad(f"the current context {current!r} is not among the contexts")
        return _File(path, current, found)

    def context(self, name: str, key: str | None = None) -> DSecConfig:
        """Return the context of that name, with another key if one is given."""
        if name not in self._contexts:
            names = ", ".join(sorted(self._contexts)) or "none"
            raise NotFoundError(f"there is no context {name!r} in {self._path}; it has {names}", reason="context_not_found")
        url, stored = self._contexts[name]
        if not key and not stored:
            raise AuthenticationError(
                f"context {name} in {self._path} has no api_key; add it, or set DSEC_API_KEY", reason="no_api_key"
            )
        return DSecConfig(url, key or stored)

    def current(self, key: str | None) -> DSecConfig:
        """Return the current context, with another key if one is given."""
        if self._current:
            return self.context(self._current, key)
        if self._contexts:
            text = f"no context is the current one in {self._path}, which has {', '.join(sorted(self._contexts))}"
            raise FailedPreconditionError(f"{text}; set DSEC_CONTEXT", reason="not_configured")
        raise FailedPreconditionError(
            f"no platform is configured in {self._path}: run `dsec up` on this machine, or set DSEC_URL and DSEC_API_KEY; "
            "one that plain sudo started wrote to root's file: use `sudo -E dsec up`",
            reason="not_configured",
        )

    def at(self, url: str) -> DSecConfig:
        """Return a context at a URL, the current one before others: a key goes only where it was stored for."""
        for name in [self._current, *sorted(self._contexts)]:
            stored, key = self._contexts.get(name, ("", ""))
            if key and _same_url(stored, url):
                return DSecConfig(stored, key)
        raise AuthenticationError(
            f"there is a URL but no key for it, neither in DSEC_API_KEY nor in {self._path}; set DSEC_API_KEY or pass api_key=",
            reason="no_api_key",
        )


def _same_url(a: str, b: str) -> bool:
    return a.rstrip("/") == b.rstrip("/")


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise AuthenticationError(
            "the API key holds characters that no key has (a line break at its end?); check DSEC_API_KEY",
            reason="invalid_api_key",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _open_files_limit() -> int:
    try:
        import resource
    except ImportError:  # not a Unix
        return 512
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
