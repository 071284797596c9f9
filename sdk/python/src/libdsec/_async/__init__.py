"""The asynchronous client: the source. The synchronous one is made from it by scripts/unasync.py."""
