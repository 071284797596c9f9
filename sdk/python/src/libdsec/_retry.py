"""When an attempt is repeated, and after how long.

Only what is safe to repeat comes here: every request of libdsec either changes nothing, or carries a key made by the
client (a create's idempotency key, a command's id, an offset), so that a repetition finds the first attempt.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ._errors import DSecError, DSecTimeoutError, UnavailableError

FIRST_DELAY = 0.05
MAX_DELAY = 2.0
CONNECT_FAILED = "connect_failed"
NO_ANSWER = "no_answer"
TLS_FAILED = "tls_failed"
TOO_MANY_REQUESTS = "too_many_requests"  # of the project, or on the platform: nothing was begun
OUT_OF_DESCRIPTORS = "out_of_descriptors"


def repeatable(error: DSecError) -> bool:
    """Whether the same request may do better a little later."""
    if isinstance(error, UnavailableError):
        return error.reason != TLS_FAILED
    if error.reason in (TOO_MANY_REQUESTS, OUT_OF_DESCRIPTORS):
        return True
    return isinstance(error, DSecTimeoutError) and error.reason == NO_ANSWER


class Backoff:
    """Delays between attempts: doubling, with jitter, until ``window`` seconds after the first failure.

    Args:
        window: seconds.
        deadline: on the clock, after which nothing is begun any more, or None.
        clock: time.monotonic.
        uniform: random.uniform.
    """

    def __init__(
        self,
        window: float,
        deadline: float | None,
        clock: Callable[[], float],
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._window = window
        self._end = deadline
        self._clock = clock
        self._uniform = uniform
        self._delay = FIRST_DELAY
        self._until: float | None = None
        self.attempts = 0

    def delay(self, error: DSecError) -> float:
        """Return how many seconds to wait before the next attempt, or raise the error if there is none."""
        self.attempts += 1
        error.attempts = self.attempts
        if not repeatable(error):
            raise error
        now = self._clock()
        if self._until is None:
            self._until = now + self._window
            if self._end is not None:
                self._until = min(self._until, self._end)
        pause = self._uniform(self._delay / 2, self._delay)
        self._delay = min(self._delay * 2, MAX_DELAY)
        if now + pause >= self._until:
            raise error
        return pause

    def progress(self) -> None:
        """Note that an attempt got somewhere: the next failure is a first one."""
        self._until = None
        self._delay = FIRST_DELAY
