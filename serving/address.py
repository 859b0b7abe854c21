"""Which addresses are this machine, and how it reaches itself: a proxy from the environment has no business there."""

from __future__ import annotations

import contextlib
import ipaddress

# For an `httpx` client that follows the environment's proxies: requests to this machine go straight.
STRAIGHT_TO_LOOPBACK: dict[str, None] = {"all://localhost": None, "all://127.0.0.1": None, "all://[::1]": None}


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, no port) is this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return False


def reachable_host(host: str) -> str:
    """The address under which this machine reaches a server that listens on `host`, ready for a URL."""
    if host in ("0.0.0.0", ""):  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
