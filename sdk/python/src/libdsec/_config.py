"""Where the platform is, and with which key: arguments, else environment, else the user's file.

A key is never sent to a place it was not configured for: the file's key is used with the file's URL only.
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

from ._errors import AuthenticationError, InvalidArgumentError

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
        bad = InvalidArgumentError(
            f"the platform's URL {url!r} is not http://host[:port], https://host[:port] or unix:///path; "
            "set DSEC_URL or pass url=",
            reason="invalid_url",
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
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
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
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            raise AuthenticationError(
                "the API key holds characters that no key has (a line break at its end?); check DSEC_API_KEY",
                reason="invalid_api_key",
            )
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
        environ: Mapping[str, str] | None = None,
    ) -> DSecConfig:
        """Find URL and key: arguments, else ``DSEC_URL``/``DSEC_API_KEY``, else the current context of the user's file.

        Raises:
            InvalidArgumentError: the file is there but cannot be used; the text says where and why.
        """
        env = os.environ if environ is None else environ
        url = url or env.get("DSEC_URL") or None
        api_key = api_key or env.get("DSEC_API_KEY") or None
        if url is None or api_key is None:
            file_url, file_key = _read_file(config_path(env))
            if url is None and file_url is not None:
                url = file_url
            if api_key is None and url is not None and url == file_url:
                api_key = file_key
        return DSecConfig(url=url or DEFAULT_URL, api_key=api_key)


def config_path(environ: Mapping[str, str]) -> Path:
    """Return ``$DSEC_CONFIG``, else ``$XDG_CONFIG_HOME/dsec/config.json``, else ``~/.config/dsec/config.json``."""
    if environ.get("DSEC_CONFIG"):
        return Path(environ["DSEC_CONFIG"])
    if environ.get("XDG_CONFIG_HOME"):
        return Path(environ["XDG_CONFIG_HOME"]) / "dsec" / "config.json"
    return Path(environ.get("HOME") or Path.home()) / ".config" / "dsec" / "config.json"


def _read_file(path: Path) -> tuple[str | None, str | None]:
    def bad(why: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"cannot use the configuration file {path}: {why}; mend it, or set DSEC_URL and DSEC_API_KEY",
            reason="invalid_config",
        )

    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except OSError as e:
        raise bad(e.strerror or "it cannot be read") from e
    try:
        data: Any = json.loads(raw)
    except ValueError:
        raise bad("it is not JSON") from None
    contexts = data.get("contexts") if isinstance(data, dict) else None
    current = data.get("current") if isinstance(data, dict) else None
    if not isinstance(contexts, dict) or not isinstance(current, str):
        raise bad('it must hold "current" and "contexts"')
    context = contexts.get(current)
    if not isinstance(context, dict):
        raise bad(f"it has no context {current!r}")
    url, key = context.get("url"), context.get("api_key")
    if not isinstance(url, str) or not (key is None or isinstance(key, str)):
        raise bad(f'context {current!r} must hold "url" and "api_key" as strings')
    return url, key or None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _open_files_limit() -> int:
    try:
        import resource
    except ImportError:  # not a Unix
        return 512
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
