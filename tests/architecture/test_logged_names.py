"""Each event and field that the code logs is in the catalogue of events."""

import ast

from kclrun.observe.events import CATALOGUE, FIELDS
from tests.architecture.sources import our_modules


def test_every_event_and_field_that_the_code_logs_is_in_the_catalogue():
    """So that no line of ours is written as unknown, and no field of ours withheld."""
    unknown = []
    for source in our_modules():
        for node in source.nodes:
            if isinstance(node, ast.Call):
                unknown += [f"{source.name}: {name}" for name in unknown_names(node)]

    assert unknown == []


def unknown_names(call):
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in {"note", "Note", "_note", "_note_change"} or not call.args:
        return
    event = call.args[0]
    if not isinstance(event, ast.Constant) or not isinstance(event.value, str):
        return
    if event.value not in CATALOGUE:
        yield event.value
    for keyword in call.keywords:
        if keyword.arg == "fields" and isinstance(keyword.value, ast.Dict):
            keys = [key.value for key in keyword.value.keys if isinstance(key, ast.Constant)]
            yield from (key for key in keys if key not in FIELDS and key != "owner")
        elif keyword.arg not in {"level", "shard", "key", "fields", "owner", None} | FIELDS:
            yield keyword.arg
