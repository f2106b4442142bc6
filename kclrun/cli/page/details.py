"""Reads the story and the live detail of a shard, while someone looks at its page.

Viewers cause these reads, so each is kept: however many look, a value is read once in its time, in
a thread of its own, and few at once. A viewer waits for the first reading for a moment, and sees
the former value while the next one is under way.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kclrun.cli.leases.why import gathered
from kclrun.errors import KclrunError
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.time import WallTime
from kclrun.observe.members import ask_for_detail, place_of
from kclrun.observe.story import ReadStory
from kclrun.operating.finished import ended_in_stories
from kclrun.operating.story import Entry, Story, present, story_of
from kclrun.page.detail_view import (
    SENTENCES_MAX,
    AskedOwner,
    LettersRead,
    StoryRead,
    unread_words,
    why_not_asked,
)
from kclrun.page.outputs_view import Warned

if TYPE_CHECKING:
    from kclrun.aws.outputs.story_objects import StoryObjects
    from kclrun.cli.page.letters import PageLetters
    from kclrun.cli.services import Aws

V = TypeVar("V")

# Managers send their stories to S3 after 10 s. A full disk ring has 8 MB, and takes 0.15 s of a
# core to read, for all shards; `_STORY_REST` keeps that below 1 %. With 4 MB of S3 these are 50,000
# entries, which fill 50 MB of memory while they are read.
_STORY_EVERY_S: Final = 15.0
# The detail is small and from memory; a page loads itself again every 10 s.
_DETAIL_EVERY_S: Final = 5.0
# After a reading no other one begins for so many times its CPU time: 1 % of a core.
_STORY_REST: Final = 99.0
# A list of a bucket is one GET for each letter, 200 at most.
_LETTERS_EVERY_S: Final = 10.0
# A viewer waits so long for the first value. There are four threads for all viewers.
_WAIT_S: Final = 1.0
# As many shards as a person has open in tabs, and more.
_KEYS_MAX: Final = 64
_OWNERS_AT_ONCE: Final = 4
# Of S3: the last day, of 4 MB, in so many calls for one reading. The rows are kept, since an
# object never changes; the next reading goes on with older ones.
_DAYS_S: Final = (86_400.0, 3_600.0, 300.0)
_LISTS_A_READING: Final = 5
_OBJECTS_A_READING: Final = 200
_OBJECTS_BYTES_MAX: Final = 4 * 1024 * 1024


class _CachedValue(Generic[V]):
    """The value of one key, and whether a reading is under way."""

    def __init__(self) -> None:
        self.value: V | None = None
        self.read_instant = float("-inf")
        self.is_reading = False
        self.is_read = threading.Event()


class OnDemand(Generic[V]):
    """Values by key. `look` reads a value at most once in `every_s`, `at_once` values at the same
    time, and after a reading none for `rest` times its CPU time. The last keys are kept."""

    def __init__(self, every_s: float, *, at_once: int, rest: float = 0.0) -> None:
        self._every_s = every_s
        self._rest = rest
        self._lock = threading.Lock()
        self._free = at_once
        self._rested_instant = float("-inf")
        self._kept: OrderedDict[str, _CachedValue[V]] = OrderedDict()

    def look(self, key: str, read: Callable[[], V], wait_s: float = _WAIT_S) -> V | None:
        """The value; None while it is read for the first time. `read` raises nothing."""
        with self._lock:
            kept = self._kept.setdefault(key, _CachedValue())
            self._kept.move_to_end(key)
            if len(self._kept) > _KEYS_MAX:
                self._kept.popitem(last=False)
            now = time.monotonic()
            is_due = not kept.is_reading and now - kept.read_instant >= self._every_s
            if is_due and self._free and now >= self._rested_instant:
                self._free -= 1
                kept.is_reading = True
                threading.Thread(target=self._read, args=(kept, read), daemon=True).start()
        if kept.value is None and kept.is_reading:
            kept.is_read.wait(wait_s)
        return kept.value

    def _read(self, kept: _CachedValue[V], read: Callable[[], V]) -> None:
        began, value = time.thread_time(), kept.value
        try:
            value = read()
        finally:
            now = time.monotonic()
            with self._lock:
                kept.value, kept.is_reading, kept.read_instant = value, False, now
                self._free += 1
                self._rested_instant = now + self._rest * (time.thread_time() - began)
            kept.is_read.set()


class RecentObjects:
    """The stories in S3 of the last day, the newest first, kept in memory within a limit. Used by
    one thread at a time."""

    def __init__(self, objects: StoryObjects, clock: Callable[[], float] = time.time) -> None:
        self._objects = objects
        self._clock = clock
        self._contents: dict[str, bytes] = {}
        self.left = 0

    def contents(self) -> Iterator[bytes]:
        """What is there of them now; `left` is how many are not read yet, or not kept.

        Raises: a ServiceError leaf.
        """
        names = self._names()
        wanted, size = {}, 0
        reads = _OBJECTS_A_READING
        self.left = 0
        for name in reversed(names):
            content = self._contents.get(name)
            if content is None and reads and size < _OBJECTS_BYTES_MAX:
                reads -= 1
                content = self._objects.get(name)
            if content is None or size + len(content) > _OBJECTS_BYTES_MAX:
                self.left += 1
                continue
            wanted[name], size = content, size + len(content)
        self._contents = wanted
        return iter(wanted.values())

    def _names(self) -> list[str]:
        """Of the last day; where that is too much to list, of the last hour or minutes."""
        for span_s in _DAYS_S:
            since = WallTime(self._clock() - span_s)
            names, is_whole = self._objects.names(since, _LISTS_A_READING)
            if is_whole:
                break
        return names


class _Stories:
    """The recorded entries of all shards, and the stories made of them so far. Two threads may make
    the story of a shard twice: both are equal."""

    def __init__(self, found: ReadStory, problem: str) -> None:
        self._of_shard: dict[str, list[Entry]] = {}
        for entry in found.entries.values():
            self._of_shard.setdefault(entry.shard, []).append(entry)
        self.warned = {
            entry.shard: Warned(entry.at, str(entry.fields.get("detail")))
            for entry in sorted(found.entries.values(), key=lambda entry: entry.at)
            if entry.event == "lease_process_warned" and entry.shard
        }
        self.ended = ended_in_stories(found.entries.values())
        self._problem = problem.strip()
        self._read_at = WallTime(time.time())
        self._stories: dict[str, Story] = {}

    def story_of(self, lease: Lease) -> StoryRead:
        """The story of a lease, with those entries of managers that are of none."""
        story = self._stories.get(lease.key)
        if story is None:
            entries = (*self._of_shard.get("", ()), *self._of_shard.get(lease.key, ()))
            story = self._stories[lease.key] = story_of(LeaseKey(lease.key), entries)
        return StoryRead(
            sentences=story.sentences[-SENTENCES_MAX:],
            before=max(0, len(story.sentences) - SENTENCES_MAX),
            now=tuple(present(lease, story)),
            read_at=self._read_at,
            problem=self._problem,
        )


class DetailReader:
    """The `Details` of a running page."""

    def __init__(self, aws: Aws, letters: PageLetters) -> None:
        self._aws = aws
        self._letters = letters
        self._networks = tuple(map(ipaddress.ip_network, aws.settings.observe.members))
        self._stories = OnDemand[_Stories](_STORY_EVERY_S, at_once=1, rest=_STORY_REST)
        self._asked = OnDemand[AskedOwner](_DETAIL_EVERY_S, at_once=_OWNERS_AT_ONCE)
        self._listed = OnDemand[LettersRead](_LETTERS_EVERY_S, at_once=1, rest=_STORY_REST)
        objects = aws.story
        self._objects = RecentObjects(objects) if objects is not None else None

    def story(self, lease: Lease) -> StoryRead | None:
        """The story as of some seconds ago, beside the present state of the row."""
        stories = self._stories.look("", self._read_stories)
        return None if stories is None else stories.story_of(lease)

    def warned(self) -> Mapping[str, Warned]:
        """The last warning of each shard, as the stories have it."""
        stories = self._stories.look("", self._read_stories)
        return {} if stories is None else stories.warned

    def ended(self) -> frozenset[str]:
        """The shards that were read to their end, as the stories have it."""
        stories = self._stories.look("", self._read_stories)
        return frozenset() if stories is None else stories.ended

    def asked(self, lease: Lease) -> AskedOwner | None:
        """The owner's answer; or why the owner cannot be asked, which the page shows."""
        place = place_of(lease.endpoint, self._networks)
        if why := why_not_asked(lease):
            return AskedOwner(why=why, read_at=WallTime(time.time()))
        if place is None:
            return AskedOwner(why=_ELSEWHERE, read_at=WallTime(time.time()))
        key = f"{lease.key} {lease.owner} {lease.endpoint}"
        return self._asked.look(key, lambda: self._ask(lease, place))

    def letters(self) -> LettersRead | None:
        """The letters, where looking at them changes nothing."""
        return self._listed.look("", self._read_letters)

    def _read_letters(self) -> LettersRead:
        at = WallTime(time.time())
        try:
            if not self._letters.are_here:
                return LettersRead(is_here=False, waiting=self._letters.waiting(), read_at=at)
            lines, are_more = self._letters.listed()
        except Exception as error:  # noqa: BLE001 - the page shows what failed
            words = str(error) if isinstance(error, KclrunError) else type(error).__name__
            return LettersRead(problem=f"They cannot be read: {words}", read_at=at)
        return LettersRead(lines=lines, are_more=are_more, read_at=at)

    def _ask(self, lease: Lease, place: tuple[str, int]) -> AskedOwner:
        detail = ask_for_detail(
            place,
            lease.key,
            application=self._aws.settings.application,
            owner=lease.owner or "",
        )
        why = "" if detail is not None else _SILENT
        return AskedOwner(detail=detail, why=why, read_at=WallTime(time.time()))

    def _read_stories(self) -> _Stories:
        problem, objects = "", self._objects
        contents: Iterator[bytes] = iter(())
        try:
            if objects is not None:
                contents = objects.contents()
                if objects.left:
                    problem = f"{objects.left} older objects of S3 are not read yet.\n"
        except KclrunError as error:
            problem = f"The stories in S3 cannot be read: {error}\n"
        try:
            found = gathered(self._aws, elsewhere=contents)
        except Exception as error:  # noqa: BLE001 - the page shows what failed
            return _Stories(ReadStory(), f"It cannot be read: {type(error).__name__}")
        return _Stories(found, problem + unread_words(found.damaged, found.unread))


_ELSEWHERE: Final = (
    "The address that its owner published is not of a private network: name its network in"
    " observe.members, and the page asks it."
)
_SILENT: Final = (
    "Its owner did not answer at the address that it published when it took the lease: the machine"
    " is lost or busy, or does not let this machine connect."
)
