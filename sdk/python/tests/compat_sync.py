"""Small things that differ between the two clients' tests."""

from time import sleep

__all__ = ["sleep"]
