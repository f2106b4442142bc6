"""Payments as JSON, some of them wrong. The template dead-letters of `kclrun init` copies this."""

from __future__ import annotations

import json
from collections.abc import Iterator

from kclrun import Checkpointer, Context, RecordBatch, RecordProcessor

__all__ = ["Payments", "some_payments"]


class Payments(RecordProcessor):
    """Emits a row for each payment."""

    def initialize(self, context: Context) -> None:
        """Called once, before the first record of the shard."""
        self.context = context

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        """Called with some records, in order. The setting `on_error` decides about exceptions."""
        for record in batch:
            payment = json.loads(record.data)
            amount = float(payment["amount"])
            self.context.emit({"id": payment["id"], "cents": round(amount * 100)})


def some_payments() -> Iterator[tuple[str, bytes]]:
    """Records to try it with: one client writes a comma where a point belongs."""
    for number in range(1_000):
        amount = "12,50" if number % 400 == 100 else "12.50"
        yield f"client-{number % 4}", json.dumps({"id": number, "amount": amount}).encode()
