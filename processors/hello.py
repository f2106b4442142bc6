"""The smallest useful processor counts words. `kclrun init` copies this file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kclrun import Checkpointer, Context, RecordBatch, RecordProcessor

__all__ = ["Hello", "greetings"]


class Hello(RecordProcessor):
    """Counts the words of each batch and emits one row a word."""

    def initialize(self, context: Context) -> None:
        """Called once, before the first record of the shard."""
        self.context = context
        self.greeting = context.options.get("greeting", "hello")

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        """Called with some records, in order. When it returns, they count as processed."""
        counts = Counter(record.data.decode() for record in batch)
        for word, times in sorted(counts.items()):
            # Rows are durable before the checkpoint that covers these records.
            self.context.emit({"greeting": self.greeting, "word": word, "times": times})


def greetings() -> Iterator[tuple[str, bytes]]:
    """Records to try it with: (partition key, payload) pairs for the embedded stream."""
    words = ("world", "moon", "stars", "sun")
    for number in range(1_000):
        word = words[number % len(words)]
        yield word, word.encode()
