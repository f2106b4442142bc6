"""The thread that renews a lease waits for no service but for the lease's own row.

A call that takes as long as the failover loses the lease. So each call out of the lease thread is
in this table, with the reason why it may be made there.
"""

import ast
from collections.abc import Iterator

from tests.architecture import sources

FILE = sources.ROOT / "kclrun" / "worker" / "lease_thread.py"
# What the thread runs: its loop, and what the pump performs.
ENTRIES = ("_run", "_perform")

# They wait, and may: each is part of a write of the own row.
WAITS = {
    "_table.write": "the write itself; its time-out is a quarter of the failover",
    "_table.read": "the own row, while the outcome of a write is not known [P6]: no write before",
    "_rows.make_durable": "no service: a file of this host is synced before its checkpoint is sent",
}
# They set or read a field under a lock that no thread holds while it waits, or use the kernel.
RETURNS_AT_ONCE = {
    *("_checkpoints.answer", "_checkpoints.note_durable"),
    *("_fetch_watch.beside", "_inbox.fileno", "_inbox.post", "_inbox.take"),
    *("_machine.next_deadline", "_machine.own"),
    *("_line.filenos", "_line.receive"),
    *("_look_ups.begin", "_look_ups.close"),
    *("_pump.answer", "_pump.post", "_pump.run"),
    *("_queue.allow_delivery", "_queue.call", "_queue.close", "_queue.stop_delivery"),
    "_queue.view",
    *("_reporter.note_send", "_reporter.publish", "_reporter.report", "_reporter.warn"),
    *("_rows.commit", "_rows.confirm", "_rows.waiting_since"),
    "_spans.committed",
}


def methods_of_the_lease_thread(source: str) -> dict[str, ast.FunctionDef]:
    (cls,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == "LeaseThread"
    )
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def own_path(node: ast.expr) -> list[str]:
    """`self._table.write` is ["_table", "write"]; empty for what does not begin with `self`."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return path if isinstance(node, ast.Name) and node.id == "self" else []


def calls_out(source: str) -> Iterator[str]:
    """The calls of collaborators in the methods that the lease thread runs. A method that is passed
    on, and not called, is run by another thread."""
    methods = methods_of_the_lease_thread(source)
    waiting, seen = list(ENTRIES), set(ENTRIES)
    while waiting:
        for node in ast.walk(methods[waiting.pop()]):
            path = own_path(node.func) if isinstance(node, ast.Call) else []
            if len(path) == 1 and path[0] in methods and path[0] not in seen:
                seen.add(path[0])
                waiting.append(path[0])
            elif len(path) > 1:
                yield ".".join(path[:2])


def test_each_call_out_of_the_lease_thread_is_in_the_table():
    found = set(calls_out(FILE.read_text()))

    assert found - set(WAITS) - RETURNS_AT_ONCE == set(), "say why it may run there"
    assert found >= {*WAITS, *RETURNS_AT_ONCE}, "the table names a call that is not made any more"


def test_a_listing_on_the_lease_thread_would_be_found():
    source = FILE.read_text()
    assert "self._look_up(self._listed)" in source
    doctored = source.replace("_look_up(self._listed)", "_pump.answer(self._listed())")

    assert "_admin.list_shards" in set(calls_out(doctored))
