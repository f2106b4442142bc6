"""The parts of a shard's page besides its row: its story, and the detail that its owner gives; and
the dead letters. Pure; `Details` reads them while the page is open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from kclrun.model.lease import Lease, Owner
from kclrun.model.stream import short_name
from kclrun.model.time import WallTime
from kclrun.observe.members import ErrorBody, LeaseDetail
from kclrun.operating.story import Sentence
from kclrun.operating.summaries import duration_text, shortened
from kclrun.page import layout
from kclrun.page.acting import letter_actions
from kclrun.page.markup import Child, Html, element, joined, short
from kclrun.page.outputs_view import Warned
from kclrun.page.snapshot import About
from kclrun.traffic.hot_shards import traffic_in_words

# A story that is longer fills several screens: `kclrun why SHARD --all` has the whole.
SENTENCES_MAX: Final = 40
_KEYS_MAX: Final = 8
_EVENTS: Final = {
    "processor_raised": "user code raised, and is called again",
    "processor_failed": "user code failed for good",
    "record_dead_lettered": "a record became a dead letter",
    "record_skipped": "a record was skipped",
    "process_died": "the process died",
    "process_stalled": "the process stood still",
    "lease_halted": "the lease was halted",
    "lease_process_warned": "its process warned",
}


class StoryRead(msgspec.Struct, frozen=True, kw_only=True):
    """The story of one shard as it was read at `read_at`: its last sentences, how many there are
    `before` them, and the state of its row `now`. `problem` is why some of it could not be read."""

    sentences: tuple[Sentence, ...] = ()
    before: int = 0
    now: tuple[str, ...] = ()
    read_at: WallTime
    problem: str = ""


class AskedOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the owner of a lease, at `read_at`; `why` says why there is no `detail`."""

    detail: LeaseDetail | None = None
    why: str = ""
    read_at: WallTime


class LetterLine(msgspec.Struct, frozen=True, kw_only=True):
    """One dead letter. The key and the beginning of the payload are None unless they may be shown
    (`observe.payloads`)."""

    given_up_at: WallTime
    stream: str
    shard_id: str
    position: str
    error: str
    calls: int
    raised_at: str = ""
    stack: str = ""
    partition_key: str | None = None
    payload: str | None = None


class LettersRead(msgspec.Struct, frozen=True, kw_only=True):
    """The dead letters as they were read at `read_at`, and whether there are more. `is_here` is
    False where they would have to be received; `waiting` then says how many there are."""

    lines: tuple[LetterLine, ...] = ()
    are_more: bool = False
    is_here: bool = True
    waiting: str = ""
    read_at: WallTime
    problem: str = ""


class Details(Protocol):
    """Reads the values that only the page of one shard shows, and keeps them for a while. Called
    from threads of the server. A method returns None while its value is being read."""

    def story(self, lease: Lease) -> StoryRead | None:
        """The story of a lease; in a quiet fleet a minute old at the most."""
        ...

    def warned(self) -> Mapping[str, Warned]:
        """The last warning of each lease's process, by the stories; none while they are read."""
        ...

    def ended(self) -> frozenset[str]:
        """The shards that the stories show as read to their end; none while they are read."""
        ...

    def asked(self, lease: Lease) -> AskedOwner | None:
        """The detail that the owner of the lease gives, some seconds old at the most."""
        ...

    def letters(self) -> LettersRead | None:
        """The dead letters of the application, some seconds old at the most."""
        ...


def detail_body(about: About, details: Details, lease: Lease) -> Html:
    """The sections of one lease."""
    return joined(
        _owner(details.asked(lease), lease) if not lease.is_ended else None,
        _story(about, lease, details.story(lease)),
    )


# The story.


def _story(about: About, lease: Lease, story: StoryRead | None) -> Html:
    title = element("h2", "Its story", id="story")
    if story is None:
        return joined(title, element("p", "It is being read.", class_="quiet"))
    command = about.of_shard(about.story_command, lease.key)
    return joined(
        title,
        element("p", story.problem, class_="words box warn") if story.problem else None,
        element(
            "p",
            f"{story.before} sentences come before these: ",
            element("code", f"{command} --all"),
            class_="quiet",
        )
        if story.before
        else None,
        element("ol", list(_lines(story.sentences)), class_="story") if story.sentences else None,
        [element("p", line, class_="words") for line in story.now if not _is_of_halt(line, lease)],
        element(
            "p",
            "By the clock of each machine, from the records of this machine and those in S3."
            if story.sentences
            else "No transition of this shard is recorded where this page runs or in S3"
            " (observe.story).",
            f" Read at {layout.instant(story.read_at)}. The same in the terminal: ",
            element("code", command),
            class_="quiet",
        ),
    )


def _is_of_halt(line: str, lease: Lease) -> bool:
    """Whether it says again what the box above says."""
    return lease.halt is not None and lease.halt.reason in line


def _lines(sentences: Sequence[Sentence]) -> Iterator[Html]:
    day = ""
    for sentence in sentences:
        at = layout.date_of(sentence.at)
        if at is None:
            is_new, clock = False, "not a time"
        else:
            is_new, day = f"{at:%Y-%m-%d}" != day, f"{at:%Y-%m-%d}"
            clock = f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}"
        yield element(
            "li",
            element("span", f"{day} {clock}" if is_new else clock, class_="id at"),
            element("span", sentence.text, class_="words"),
        )


# The detail that the owner gives.


def _owner(asked: AskedOwner | None, lease: Lease) -> Html:
    title = element("h2", "Live, from its owner", id="live")
    if asked is None:
        return joined(title, element("p", "Its owner is being asked.", class_="quiet"))
    detail = asked.detail
    if detail is None:
        return joined(title, element("p", asked.why, class_="quiet"))
    return joined(
        title,
        layout.facts(_rates(detail, lease)),
        _traffic(detail),
        _errors(_once(detail.errors)),
        element("p", f"Asked at {layout.instant(asked.read_at)}.", class_="quiet"),
    )


def why_not_asked(lease: Lease) -> str:
    """Why the owner of a lease cannot be asked; empty if it can."""
    if lease.owner is None or Owner.parse(lease.owner) is None:
        return "It has no owner that can be asked."
    if lease.endpoint is None:
        return (
            "Its owner serves no detail: with observe.listen, a manager publishes its address when"
            " it takes a lease."
        )
    return ""


def _rates(detail: LeaseDetail, lease: Lease) -> Iterator[tuple[str, Child]]:
    yield "it is", layout.state_badge(detail.state)
    # The reason of a halt is above.
    if detail.note and not (detail.state == "halted" and lease.halt is not None):
        yield "because", element("span", detail.note, class_="words")
    yield "read", f"{detail.records_per_s:.1f} records/s"
    yield "since its manager started", f"{detail.records_total} records, {detail.bytes_total} bytes"
    yield "behind, by its reads", _milliseconds(detail.lag_ms)
    yield "oldest row not yet in the outputs", _milliseconds(detail.output_lag_ms)
    if detail.still_s is not None:
        yield "without progress for", duration_text(detail.still_s)
    if detail.destination_away_s is not None:
        yield "a destination has failed for", duration_text(detail.destination_away_s)
    counts = (
        ("retries", detail.retries_total),
        ("dead letters", detail.dead_letters_total),
        ("skipped records", detail.skipped_total),
        ("restarts of its process", detail.restarts),
    )
    yield "failures", ", ".join(f"{count} {name}" for name, count in counts if count) or "none"


def _milliseconds(value: int | None) -> str:
    return "-" if value is None else duration_text(value / 1000)


def _traffic(detail: LeaseDetail) -> Html | None:
    traffic, hot = detail.traffic, detail.hot
    if traffic is None:
        return None
    come_in = traffic_in_words(traffic.in_bytes_per_s, traffic.in_records_per_s)
    rows = [
        element(
            "tr",
            element("td", key.hash_key, class_="id"),
            element("td", f"{key.share:.0%}", class_="n"),
        )
        for key in traffic.keys[:_KEYS_MAX]
    ]
    return joined(
        element(
            "div",
            element("p", element("strong", f"Hot: {hot.reason}")),
            element("p", hot.advice, class_="words"),
            class_="box warn",
        )
        if hot is not None
        else None,
        element(
            "p",
            f"{come_in} come in: {traffic.load:.0%} of what a shard takes. Throttled:"
            f" {traffic.throttled:.0%} of its reads.",
        ),
        layout.table(
            "The heaviest keys, by their hash keys",
            ("hash key", "share of the traffic"),
            rows,
            label="Heavy keys",
        )
        if rows
        else None,
    )


def _once(errors: Sequence[ErrorBody]) -> tuple[ErrorBody, ...]:
    """Without the halt by an error that is there with its stack, too."""
    failed = {error.error for error in errors if error.event == "processor_failed"}
    return tuple(
        error
        for error in errors
        if error.event != "lease_halted" or not any(words in error.error for words in failed)
    )


def _errors(errors: Sequence[ErrorBody]) -> Html:
    if not errors:
        return joined(element("h3", "Last errors"), element("p", "None."))
    return joined(element("h3", "Last errors"), [_error(error) for error in errors])


def _error(error: ErrorBody) -> Html:
    places = [
        f"at {error.raised_at}" if error.raised_at else "",
        f"record {error.position}" if error.position else "",
        f"call {error.attempts}" if error.attempts else "",
    ]
    return element(
        "details",
        element(
            "summary",
            element("span", layout.instant(error.at), class_="id"),
            f" {_EVENTS.get(error.event, error.event)}: {layout.one_line(error.error)}",
        ),
        element("p", ", ".join(filter(None, places)) or "no place is known"),
        element("p", error.error, class_="words"),
        element("pre", error.stack, class_="words", tabindex=0) if error.stack else None,
        class_="box",
    )


# Dead letters.


def letters_body(about: About, letters: LettersRead | None) -> Html:
    """The dead letters, or where they are."""
    command = element("p", "In the terminal: ", element("code", f"{about.letters_command} list"))
    if not about.letters:
        command, listed = joined(), None
    elif letters is None:
        listed = element("p", "They are being read.", class_="quiet")
    elif letters.problem:
        listed = element("p", letters.problem, class_="words box warn")
    elif not letters.is_here:
        listed = element(
            "p",
            f"{letters.waiting} The page does not list them: it would have to receive them from the"
            " queue, and they would be hidden from others for ten minutes. A command lists them.",
        )
    else:
        listed = _letters(about, letters)
    return joined(
        element("h2", "Dead letters", id="letters"),
        element("p", about.letters or "The application keeps no dead letters."),
        listed,
        command,
    )


def _letters(about: About, letters: LettersRead) -> Html:
    lines = letters.lines
    if not lines:
        return element("p", "There are none.")
    is_open = any(line.payload is not None for line in lines)
    heads = ("given up", "stream", "shard", "position", "calls")
    more = " These are the first; there are more." if letters.are_more else ""
    count = "1 dead letter" if len(lines) == 1 else f"{len(lines)} dead letters"
    caption = f"{count}, read at {layout.instant(letters.read_at)}.{more}"
    return joined(
        layout.table(
            caption,
            (*heads, "partition key", "payload") if is_open else heads,
            [row for line in lines for row in _letter(line)],
            label="Dead letters",
        ),
        letter_actions(None, what="redrive all") if about.has_actions else None,
    )


def _letter(line: LetterLine) -> Iterator[Html]:
    """A row; below it the error, where a window of any width shows it."""
    data = (line.partition_key, line.payload) if line.payload is not None else ()
    yield element(
        "tr",
        element("th", layout.instant(line.given_up_at), scope="row", class_="id"),
        element("td", short(line.stream)),
        element("td", short_name(line.shard_id), class_="id"),
        element("td", short(shortened(line.position)), class_="id one"),
        element("td", line.calls, class_="n"),
        [element("td", text, class_="words") for text in data],
    )
    error = element("div", _letter_error(line))
    yield element("tr", element("td", error, colspan=5 + len(data)), class_="why")


def _letter_error(line: LetterLine) -> Html:
    return element(
        "details",
        element("summary", layout.one_line(line.error)),
        element("p", f"at {line.raised_at}") if line.raised_at else None,
        element("pre", line.stack, class_="words", tabindex=0) if line.stack else None,
    )


def unread_words(damaged: int, unread: int) -> str:
    """The parts of a story that could not be read, in words; empty if there are none."""
    if not damaged and not unread:
        return ""
    return f"{damaged} damaged entries and {unread} unreadable files were passed over."
