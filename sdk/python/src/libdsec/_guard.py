"""Nothing left after Ctrl-C, also where no context manager was used.

A process that ends by an unhandled exception, KeyboardInterrupt among them, asks the platform to end the sandboxes that
it made and did not stop. It is the last resort of three: context managers end them in order, and the platform's times to
live end what a killed process left.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref

from ._config import DSecConfig
from ._errors import DSecError, NotFoundError

log = logging.getLogger("libdsec")

_all: weakref.WeakSet[Owned]
_lock = threading.Lock()
_registered = False


class Owned:
    """Ids of sandboxes that a client made and that were not stopped."""

    def __init__(self, config: DSecConfig) -> None:
        self._config = config
        self._ids: dict[str, None] = {}
        self._pid = os.getpid()

    @property
    def ids(self) -> list[str]:
        """The ids, oldest first; none in a fork's copy: they are the parent's."""
        return list(self._ids) if os.getpid() == self._pid else []

    def add(self, sandbox_id: str) -> None:
        """Note a sandbox."""
        global _registered
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._ids = {}
        if not self._ids:
            with _lock:
                _all.add(self)
                if not _registered:
                    _registered = True
                    atexit.register(_at_exit)
        self._ids[sandbox_id] = None

    def discard(self, sandbox_id: str) -> None:
        """Forget a sandbox."""
        self._ids.pop(sandbox_id, None)

    def release(self) -> None:
        """Forget all: the client was closed in order."""
        self._ids.clear()

    def stop_all(self) -> None:
        """Ask the platform to end them, for at most ``cleanup_seconds``. Does not wait for their end."""
        from ._sync.api import Api

        api = Api(self._config)
        end = time.monotonic() + self._config.cleanup_seconds
        failed: list[DSecError] = []
        for sandbox_id in self.ids:
            try:
                api.call("DeleteSandbox", {"id": sandbox_id}, urgent=True, retry=False, until=end)
            except NotFoundError:
                pass
            except DSecError as e:
                failed.append(e)
            self.discard(sandbox_id)
        if failed:
            log.warning("%d sandboxes could not be stopped, and are left to their times to live: %s", len(failed), failed[0])
        api.close()


_all = weakref.WeakSet()


def _at_exit() -> None:
    if getattr(sys, "last_type", None) is None or hasattr(sys, "ps1"):
        return  # the process ends in order; at a prompt, an exception says nothing about that
    for owned in list(_all):
        if owned.ids:
            owned.stop_all()
