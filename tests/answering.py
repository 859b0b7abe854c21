"""A small HTTP server for tests that only ask and look at the answer; streams are tests/scripted_server.py's."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, object]  # status, and a text, bytes, or something to be sent as JSON
Answerer = Callable[[str, str, Mapping[str, str], bytes], Answer]  # method, path, headers (any case), body


def free_port() -> int:
    """A port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pages(found: Mapping[str, object], *, status: int = 200, key: str | None = None) -> Answerer:
    """These pages by path, 404 for others; with `key`, 401 for who does not bring it."""

    def answer(_method: str, path: str, headers: Mapping[str, str], _body: bytes) -> Answer:
        if key is not None and headers.get("authorization") != f"Bearer {key}":
            return 401, {}
        return (status, found[path]) if path in found else (404, {})

    return answer


@contextmanager
def answering(answer: Answerer) -> Iterator[str]:
    """Serve `answer` on loopback; yields http://host:port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length", 0)))
            code, content = answer(self.command, self.path, self.headers, raw)
            text = content if isinstance(content, str | bytes) else json.dumps(content)
            data = text.encode() if isinstance(text, str) else text
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
