"""Orders as JSON; each becomes a row. Some templates of `kclrun init` copy this file."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kclrun import Checkpointer, Context, RecordBatch, RecordProcessor

__all__ = ["Orders", "some_orders"]


class Orders(RecordProcessor):
    """Emits a row for each order."""

    def initialize(self, context: Context) -> None:
        """Called once, before the first record of the shard."""
        self.context = context

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        """Called with some records, in order. When it returns, they count as processed."""
        for record in batch:
            order = json.loads(record.data)
            # Rows are durable before the checkpoint that covers this record.
            self.context.emit({name: order[name] for name in ("id", "customer", "cents")})


def some_orders() -> Iterator[tuple[str, bytes]]:
    """Records to try it with: (partition key, payload) pairs for the embedded stream."""
    customers = ("ada", "grace", "edsger", "barbara")
    for number in range(100):
        customer = customers[number % len(customers)]
        order = {"id": number, "customer": customer, "cents": 100 + number}
        yield customer, json.dumps(order).encode()
