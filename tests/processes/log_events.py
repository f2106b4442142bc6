"""The events in a log that stacks of dying processes were written into, too."""

import json

_BEGINNING = '{"ts"'
_DECODER = json.JSONDecoder()


def events_in(text):
    """The events of a log, in order.

    Several processes dump their stacks into one log piece by piece: an event may stand behind a
    piece, on one line with it, and a piece alone on its line may be JSON by chance.
    """
    events = []
    for line in text.splitlines():
        begin = line.find(_BEGINNING)
        while begin >= 0:
            try:
                event, end = _DECODER.raw_decode(line, begin)
            except json.JSONDecodeError:
                break  # The last line, not whole yet.
            events.append(event)
            begin = line.find(_BEGINNING, end)
    return events
