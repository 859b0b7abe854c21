"""The machine's certificates for TLS, loaded once a process: that takes some 30 ms, each time, of whoever asks."""

from __future__ import annotations

import functools
import ssl

import httpx


@functools.cache
def certificates() -> ssl.SSLContext:
    """What an `httpx` client that verifies servers gets as `verify`."""
    return httpx.create_ssl_context()
