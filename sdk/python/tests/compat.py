"""Small things that differ between the two clients' tests."""

from asyncio import sleep

__all__ = ["sleep"]
