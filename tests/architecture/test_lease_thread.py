"""The thread that renews a lease waits for no service but for the lease's own row.

A call that takes as long as the failover loses the lease. So each call out of the lease thread is
in this table, with the reason why it may be made there.
"""

import ast
from collections.abc import Iterator

from tests.architecture import sources

WORKER = sources.ROOT / "kclrun" / "worker"
# The classes whose methods the lease thread runs, by the name by which they call each other.
RUN_BY_IT = {
    "": ("lease_thread.py", "LeaseThread"),
    "_driver": ("lease_driver.py", "LeaseDriver"),
    "own_row": ("own_row.py", "OwnRow"),
}
# Where it begins: its loop, and what the pump performs.
ENTRIES = (("", "_run"), ("_driver", "_perform"))

# They wait, and may: each is part of a write of the own row.
WAITS = {
    "_table.write": "the write itself; its time-out is a quarter of the failover",
    "_table.read": "the own row, while the outcome of a write is not known [P6]: no write before",
    "_make_durable": "no service: a file of this host is synced before its checkpoint is sent",
}
# They set or read a field under a lock that no thread holds while it waits, or use the kernel.
RETURNS_AT_ONCE = {
    *("_checkpoints.answer", "_checkpoints.note_durable"),
    *("_inbox.fileno", "_inbox.post", "_inbox.take"),
    "_machine.next_deadline",
    *("_line.filenos", "_line.receive"),
    *("look_ups.close", "look_ups.list_shards", "look_ups.read_rows"),
    "_note_send",
    "_own.sends",
    "_pump.answer",
    *("_driver.post", "_driver.run"),  # those of the pump
    *("_queue.allow_delivery", "_queue.call", "_queue.close", "_queue.stop_delivery"),
    "_queue.view",
    *("_reporter.publish", "_reporter.report", "_reporter.warn"),
    *("_rows.commit", "_rows.confirm", "_rows.waiting_since"),
    "_spans.committed",
    *("_now", "_on_over", "_rest_s"),
}


def methods_of(source: str, name: str) -> dict[str, ast.FunctionDef]:
    (cls,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def own_path(node: ast.expr) -> list[str]:
    """`self._table.write` is ["_table", "write"]; empty for what does not begin with `self`."""
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return path if isinstance(node, ast.Name) and node.id == "self" else []


def calls_out(sources_of: dict[str, str]) -> Iterator[str]:
    """The calls of collaborators in the methods that the lease thread runs. A method that is passed
    on, and not called, is run by another thread."""
    methods = {
        called: methods_of(sources_of[called], name) for called, (_, name) in RUN_BY_IT.items()
    }
    waiting, seen = list(ENTRIES), set(ENTRIES)
    while waiting:
        owner, method = waiting.pop()
        for node in ast.walk(methods[owner][method]):
            path = own_path(node.func) if isinstance(node, ast.Call) else []
            if not path:
                continue
            # The driver's collaborators, as the thread calls them: `_driver.look_ups.close`.
            *between, name = path[-2:]
            callee = between[0] if between else owner
            if name in methods.get(callee, {}):
                if (callee, name) not in seen:
                    seen.add((callee, name))
                    waiting.append((callee, name))
            else:
                yield ".".join(path[-2:])


def all_sources() -> dict[str, str]:
    return {called: (WORKER / file).read_text() for called, (file, _) in RUN_BY_IT.items()}


def test_each_call_out_of_the_lease_thread_is_in_the_table():
    found = set(calls_out(all_sources()))

    assert found - set(WAITS) - RETURNS_AT_ONCE == set(), "say why it may run there"
    assert found >= {*WAITS, *RETURNS_AT_ONCE}, "the table names a call that is not made any more"


def test_a_listing_on_the_lease_thread_would_be_found():
    doctored = all_sources()
    assert "self.look_ups.list_shards()" in doctored["_driver"]
    doctored["_driver"] = doctored["_driver"].replace(
        "self.look_ups.list_shards()", "self._admin.list_shards()"
    )

    assert "_admin.list_shards" in set(calls_out(doctored))
