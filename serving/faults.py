"""From a failed HTTP exchange to a typed, one-line, secret-free :class:`RequestError`."""

from __future__ import annotations

import re

import httpx2
import openai

from serving.records import ErrorKind, RequestError
from serving.sse import EventTooLargeError
from serving.stream import StreamError, error_text, one_line

_USER_INFO = re.compile(r"(?<=://)[^/@\s]*@")
_OVERLOADED = frozenset({429, 503})


def explain(error: Exception, *, endpoint: str, answering: bool, api_key: str | None) -> RequestError | None:
    """The typed cause of `error`, or None when it is no failure of the server or the network.

    Args:
        error: What the HTTP client or the stream reader raised.
        endpoint: The base URL, for the message.
        answering: The server had begun a 200 answer.
        api_key: Never shown, even where the server echoes it.
    """
    found = _explain(error, endpoint, answering=answering)
    if found is None:
        return None
    message = _USER_INFO.sub("***@", found.message)
    if api_key:
        message = message.replace(api_key, "***")
    return RequestError(found.kind, message, found.status)


def _explain(error: Exception, endpoint: str, *, answering: bool) -> RequestError | None:
    if isinstance(error, StreamError):
        return error.error
    if isinstance(error, EventTooLargeError):
        return RequestError(ErrorKind.PROTOCOL, str(error))
    if isinstance(error, openai.APIStatusError):
        return _status(error)
    if isinstance(error, openai.APIConnectionError):
        cause = error.__cause__
        return _network(cause if isinstance(cause, Exception) else error, endpoint, answering=answering)
    if isinstance(error, httpx2.HTTPError | OSError):
        return _network(error, endpoint, answering=answering)
    return None


def _network(cause: Exception, endpoint: str, *, answering: bool) -> RequestError:
    if isinstance(cause, httpx2.TimeoutException):
        return RequestError(ErrorKind.TIMEOUT_CONNECT, f"no connection to {endpoint} in time")
    if isinstance(cause, httpx2.DecodingError):
        return RequestError(ErrorKind.PROTOCOL, f"the answer cannot be decoded: {one_line(cause)}")
    why = one_line(cause) or type(cause).__name__
    if answering:
        return RequestError(ErrorKind.CUT, f"the connection broke in mid-stream: {why}")
    return RequestError(ErrorKind.CONNECT, f"no server answers at {endpoint}: {why}")


def _status(error: openai.APIStatusError) -> RequestError:
    status = error.status_code
    detail = error_text(error.body if error.body is not None else error.response.text)
    if status in _OVERLOADED:
        return RequestError(ErrorKind.OVERLOADED, f"the server is overloaded (HTTP {status}): {detail}", status)
    if status >= 500:
        return RequestError(ErrorKind.SERVER, f"the server failed (HTTP {status}): {detail}", status)
    if status < 400:
        target = one_line(error.response.headers.get("location", "elsewhere"))
        message = f"the server redirects to {target} (HTTP {status}); set base_url to where it leads"
        return RequestError(ErrorKind.REJECTED, message, status)
    return RequestError(ErrorKind.REJECTED, f"the server refused the request (HTTP {status}): {detail}", status)
