"""The one door to the model: requests of every class go through it, into one ledger and one store."""

from __future__ import annotations

from collections.abc import Callable

from serving.client import ActiveRequest, ModelClient
from serving.latency import Ledger
from serving.records import Outcome, RequestRecord, TokenEvent, now_s
from serving.request import ModelRequest


class Traffic:
    """Starts requests, and keeps the ledger of all that were due.

    Args:
        keep: Given every record, from the client's thread; must be quick.
    """

    def __init__(self, client: ModelClient, ledger: Ledger, keep: Callable[[RequestRecord], None]) -> None:
        self.client = client
        self.ledger = ledger
        self._keep = keep

    def due(self, request_id: str, traffic_class: str, due_s: float) -> None:
        """A request is due and waits."""
        self.ledger.begin(request_id, traffic_class, due_s)

    def start(
        self,
        request: ModelRequest,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_sent: Callable[[float], None] | None = None,
    ) -> ActiveRequest:
        """Send a request that is `due`. The callbacks come from the client's thread and must be quick."""
        request_id = request.request_id

        def sent(at_s: float) -> None:
            self.ledger.sent(request_id, at_s)
            if on_sent is not None:
                on_sent(at_s)

        def token(event: TokenEvent) -> None:
            self.ledger.token(request_id, event)
            if on_token is not None:
                on_token(event)

        return self.client.start(request, token, sent, self._end)

    def never_sent(self, request_id: str, traffic_class: str, due_s: float, outcome: Outcome, reason: str) -> None:
        """A request that was `due` ended before it was sent: skipped or cancelled, and why."""
        self._end(
            RequestRecord(
                request_id=request_id,
                traffic_class=traffic_class,
                model="",
                due_s=due_s,
                finished_s=now_s(),
                outcome=outcome,
                reason=reason,
            )
        )

    def _end(self, record: RequestRecord) -> None:
        self.ledger.finish(record)
        self._keep(record)
