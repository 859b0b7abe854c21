"""What the HTTP routes work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from starlette.requests import HTTPConnection

from pipeline.chat import Chat
from pipeline.comparisons import Comparisons
from pipeline.documents import Documents
from pipeline.live import Live
from pipeline.maintenance import Maintenance
from pipeline.pictures import Pictures
from pipeline.runtime import Runtime

STOPPING = "the service stops"


@dataclass(slots=True, eq=False)
class Parts:
    """The running parts of a service."""

    runtime: Runtime
    chat: Chat
    documents: Documents
    pictures: Pictures
    live: Live
    maintenance: Maintenance
    comparisons: Comparisons

    def end_streams(self) -> None:
        """The service is about to stop: whoever listens hears the end instead of a broken connection."""
        self.runtime.feed.end()
        self.chat.stop(STOPPING)


def parts_of(connection: HTTPConnection) -> Parts:
    """The parts of the service that a request came to."""
    return cast(Parts, connection.app.state.parts)
