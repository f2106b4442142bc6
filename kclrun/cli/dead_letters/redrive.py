"""Letters processed again by the processor: which of them may be, and their end."""

from __future__ import annotations

import itertools
import os
import secrets
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kclrun.cli.child_lines import lines_of
from kclrun.cli.config_options import Configuration
from kclrun.cli.dead_letters import user_process
from kclrun.cli.dead_letters.user_process import RedriveJob, Redriven, ServiceAccess
from kclrun.cli.messages import echo
from kclrun.cli.user_code import output_folder, own_module
from kclrun.codec.record_sizes import RecordLimit
from kclrun.codec.row_lines import encode_row_line
from kclrun.config.changes import refuse_changes
from kclrun.config.outputs import output_places
from kclrun.config.rules import EMBEDDED
from kclrun.config.schema import Settings, StreamSettings, stream_name
from kclrun.errors import KclrunError, LimitExceeded, NotFound, SettingsError
from kclrun.files.durable import publish_file, remove_unfinished
from kclrun.loading import GLUE, import_paths
from kclrun.manager.launcher import lease_environment
from kclrun.model.lease import Lease
from kclrun.model.letter import KeptLetter, Letter
from kclrun.model.output import MAIN_OUTPUT, OutputDestination
from kclrun.model.record import PutEntry
from kclrun.model.stream import ONLY_STREAM, StreamKey, shard_id_of, stream_name_of, stream_of
from kclrun.ports import LetterStore, record_limit


class Redrive(msgspec.Struct, frozen=True):
    """The plan for the letters of one stream, in words. `to` is processor or stream."""

    source: StreamSettings
    letters: Sequence[KeptLetter]
    to: str

    @property
    def words(self) -> str:
        verb = "put {} back" if self.to == "stream" else "process {}"
        return f"Would {verb.format(self.what)}"

    @property
    def what(self) -> str:
        return f"{len(self.letters)} dead letters of {stream_name(self.source.name)}"


class Done(msgspec.Struct, frozen=True):
    """The end of a redrive in words; `left` are still letters."""

    words: str
    left: int


Report = Callable[[str], None]
_warn: Report = partial(echo, err=True)


def redrives_of(
    configuration: Configuration, kept: Sequence[KeptLetter], to: str, report: Report = _warn
) -> list[Redrive]:
    """The plan for each stream of the application. Letters of other streams stay, and are named.
    Raises: SettingsError, if there are only such letters."""
    sources = {stream_name(source.name): source for source in configuration.settings.sources}
    found: dict[str, list[KeptLetter]] = {}
    for kept_letter in kept:
        found.setdefault(kept_letter.letter.stream, []).append(kept_letter)
    if others := found.keys() - sources.keys():
        words = f"dead letters of {', '.join(sorted(others))}: not a stream of this application"
        if not found.keys() & sources.keys():
            raise SettingsError(words)
        report(f"{sum(len(found[name]) for name in others)} {words}; they stay")
    return [
        Redrive(sources[name], letters, to) for name, letters in found.items() if name in sources
    ]


def carry_out(
    configuration: Configuration,
    store: LetterStore,
    redrive: Redrive,
    leases: Leases,
    report: Report = _warn,
) -> Done:
    """Do what was planned, without the letters that have to wait; `report` gets messages for the
    user. `leases` were read before the letters.

    Raises: SettingsError, a ServiceError leaf; then some letters may be done and removed.
    """
    ready, done = settled(leases, redrive.letters, report), 0
    if ready and redrive.to == "stream":
        done = _put_back(configuration, store, redrive.source.name, ready, report)
    elif ready:
        done = len(ready) - process_again(configuration, redrive.source, store, ready, report)
    verb = "Put back" if redrive.to == "stream" else "Processed"
    return Done(f"{verb} {done} of {redrive.what}", len(redrive.letters) - done)


def _put_back(
    configuration: Configuration,
    store: LetterStore,
    stream: str,
    letters: Sequence[KeptLetter],
    report: Report,
) -> int:
    """Returns how many are in the stream again. A record that the service refuses for good stays a
    letter, and is named; the others do not wait for it. Raises: SettingsError, a ServiceError."""
    from kclrun.aws.put_records import batches, send_accepted
    from kclrun.cli.services import Aws

    refuse_changes(
        configuration.settings,
        "putting dead letters back",
        "that of a DynamoDB table takes none; redrive them through the processor",
    )
    aws = Aws(configuration.settings)
    refusals = _Refusals(report)
    limit = record_limit(aws.admin_of(stream))
    waiting = [kept for kept in letters if refusals.accepts(kept, limit)]
    entries, done = (entry_of(kept.letter) for kept in tuple(waiting)), 0
    for batch in batches(entries, one_a_key=True):
        sent, waiting = waiting[: len(batch)], waiting[len(batch) :]
        refused = send_accepted(aws.kinesis_client, stream, batch)
        for index, error in refused.items():
            refusals.refuse(sent[index], error)
        accepted = [kept for index, kept in enumerate(sent) if index not in refused]
        store.remove(accepted)
        done += len(accepted)
    refusals.close()
    return done


def entry_of(letter: Letter) -> PutEntry:
    """The record that gives the letter's once more. A user record whose payload is an aggregate
    itself goes into one of its own: alone in a record it would be opened."""
    from kclrun.codec.aggregator import build_aggregate
    from kclrun.codec.kpl import is_sound

    data, key, hash_key = letter.data, letter.partition_key, letter.explicit_hash_key
    if is_sound(data):
        data = build_aggregate([(key, data, hash_key)])
    return PutEntry(data, key, hash_key)


# The refused letters that have a line each; they may be thousands.
_NAMED_MAX: Final = 20


class _Refusals:
    """Names the letters whose records the service never takes."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._count = 0

    def accepts(self, kept: KeptLetter, limit: RecordLimit) -> bool:
        """Whether the record keeps the limits of the stream."""
        try:
            limit.checked_size_bytes(entry_of(kept.letter))
        except LimitExceeded as error:
            self.refuse(kept, error)
            return False
        return True

    def refuse(self, kept: KeptLetter, error: KclrunError) -> None:
        self._count += 1
        if self._count <= _NAMED_MAX:
            letter = kept.letter
            self._report(f"{letter.shard_id}, {letter.position}: it stays a dead letter: {error}")

    def close(self) -> None:
        """Say how many more there are."""
        if self._count > _NAMED_MAX:
            self._report(f"… and {self._count - _NAMED_MAX} more that the stream never takes")


def process_again(
    configuration: Configuration,
    source: StreamSettings,
    store: LetterStore,
    letters: Sequence[KeptLetter],
    report: Report = _warn,
) -> int:
    """Run the processor over the letters of one stream, shard by shard, in a process of its own.
    Returns how many of them are still letters. Raises: SettingsError."""
    settings = configuration.settings
    if source.processor is None:
        raise SettingsError(f"processor: is missing for {source.name}; add --to stream")
    if settings.state is not None:
        raise SettingsError(
            "the processor's state is changed by its lease alone: add --to stream, and the fleet"
            " processes the records again"
        )
    places = _places(settings, letters[0].letter.stream)
    rows = _GrowingRows(output_folder(settings))
    left = 0
    job = msgspec.json.encode(_job(configuration, source, places))
    environment = lease_environment(os.environ, settings.environment.only)
    with closing(_UserProcesses(environment, job)) as processes:
        for shard, of_shard in itertools.groupby(letters, lambda kept: kept.letter.shard_id):
            for kept, given in processes.answers(list(of_shard)):
                refusal = rows.refusal(given)
                answer = Redriven(error=refusal) if refusal else given
                if answer.error:
                    indented = answer.error.replace("\n", "\n  ")
                    report(f"{shard}: {indented}")
                rows.keep(shard, answer)
                store.remove([kept[index] for index in answer.done])
                left += len(kept) - len(answer.done)
    return left


def _places(settings: Settings, stream: str) -> tuple[OutputDestination, ...]:
    """The outputs of a fleet but for a file that grows."""
    if settings.engine != "fleet":
        return ()
    # Places know a stream by its name only.
    key = StreamKey(f"0:{stream}:0") if settings.streams else ONLY_STREAM
    return tuple(place for place in output_places(settings, key) if not place.grows)


Leases = Mapping[str, Sequence[Lease]]


def leases_now(settings: Settings) -> Leases:
    """The rows of the lease table, by shard. No rows on Spark, which has no table, nor with the
    embedded AWS, whose table ended with its run: nothing is read any more.

    Read them before the letters: where a checkpoint has passed a letter of a former owner, the next
    owner had recorded before that the letter does not count [K20].
    """
    from kclrun.cli.services import Aws

    leases: defaultdict[str, list[Lease]] = defaultdict(list)
    if settings.engine == "fleet" and settings.aws.endpoint != EMBEDDED:
        with suppress(NotFound):
            for page in Aws(settings).table.scan():
                for lease in page.leases:
                    leases[shard_id_of(lease.key)].append(lease)
    return leases


def settled(
    leases: Leases, letters: Sequence[KeptLetter], report: Report = _warn
) -> list[KeptLetter]:
    """The letters of a stream whose records no lease process will read again.

    A letter is there before the checkpoint passes its record. Until then the record may be read
    again, and by a fixed processor: its rows would come from both [K20]. A shard without a lease
    is not read any more.
    """
    name = letters[0].letter.stream
    found = [
        letter
        for letter in letters
        if not any(
            _may_read(lease, letter.letter) for lease in leases.get(letter.letter.shard_id, ())
        )
    ]
    if waiting := len(letters) - len(found):
        report(
            f"{waiting} dead letters of {name} wait for the checkpoint of their shard to pass them:"
            " until then the fleet may read their records again"
        )
    return found


def _may_read(lease: Lease, letter: Letter) -> bool:
    """Whether the lease is behind the letter, and of the same stream, as far as that is known."""
    if stream_name_of(stream_of(lease.key)) not in {"", letter.stream}:
        return False
    created, ours = lease.stream_created_at, letter.stream_created_at
    return lease.checkpoint < letter.record.position and (not created or ours in {0.0, created})


def _job(
    configuration: Configuration, source: StreamSettings, places: tuple[OutputDestination, ...]
) -> RedriveJob:
    settings = configuration.settings
    assert source.processor is not None, "its caller refused that"
    is_served = places or source.decode == GLUE
    return RedriveJob(
        processor=source.processor,
        import_paths=tuple(map(str, import_paths(settings.path, configuration.folder))),
        application=settings.application,
        stream=stream_name(source.name),
        options=source.options,
        retries=settings.on_error_of(source).retries,
        batch_max=settings.fetch.batch_max,
        uncheckpointed_max=settings.checkpoint.uncheckpointed_max,
        decode=source.decode,
        schemas=_schemas(settings, places),
        services=_services(settings) if is_served else None,
        places=places,
        is_manual=settings.checkpoint.every == "manual",
    )


def _schemas(settings: Settings, places: Sequence[OutputDestination]) -> dict[str, str]:
    """The schema of each output that has one: Spark's outputs are not among the places."""
    main = {MAIN_OUTPUT: settings.output.schema} if settings.output is not None else {}
    schemas = main | {place.name: place.schema for place in places}
    return {name: schema for name, schema in schemas.items() if schema is not None}


def _services(settings: Settings) -> ServiceAccess:
    from kclrun.cli.services import Aws

    aws = Aws(settings)
    return ServiceAccess(aws.kinesis, aws.credentials.current(), settings.aws.url_of("glue"))


# A processor that ends its process for so many letters in a row ends it for all.
_ENDS_MAX: Final = 3
_ENDED: Final = "the process of the processor ended; its dead letters stay"


class _UserProcesses:
    """The process of user code; another one takes its place if it ends with a letter."""

    def __init__(self, environment: Mapping[str, str], job: bytes) -> None:
        self._environment = environment
        self._job = job
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: Iterator[bytes] = iter(())
        self._ends = 0

    def answers(
        self, letters: Sequence[KeptLetter]
    ) -> Iterator[tuple[Sequence[KeptLetter], Redriven]]:
        """The answer to the letters of a shard. Where the process ended with them, one for each
        letter: only those that end it stay."""
        answer = self._answer(letters)
        if answer is not None:
            yield letters, answer
            return
        if len(letters) == 1 or self._ends >= _ENDS_MAX:
            yield letters, Redriven(error=_ENDED)
            return
        for letter in letters:
            answer = None if self._ends >= _ENDS_MAX else self._answer([letter])
            if answer is None:
                answer = Redriven(error=f"{letter.letter.position}: {_ENDED}")
            yield [letter], answer

    def _answer(self, letters: Sequence[KeptLetter]) -> Redriven | None:
        """None if the process ended."""
        if self._process is None:
            self._process = subprocess.Popen(
                own_module(user_process.__name__),
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._lines = lines_of(self._process)
            self._ask(self._job)
        self._ask(msgspec.json.encode([kept.letter for kept in letters]))
        line = next(self._lines, b"")
        if not line.endswith(b"\n"):
            self._ends += 1
            self.close()
            return None
        self._ends = 0
        return msgspec.json.decode(line, type=Redriven)

    def _ask(self, line: bytes) -> None:
        assert self._process is not None, "its caller started it"
        assert self._process.stdin is not None, "a pipe"
        with suppress(BrokenPipeError):  # `_answer` notices it
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the process and wait for it. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        with process, suppress(BrokenPipeError):
            assert process.stdin is not None, "a pipe"
            process.stdin.close()


class _GrowingRows:
    """The rows of redriven letters where `output` is a file that grows: files of its folder, one
    for each shard and redrive, on the disk before the letters are removed."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._began = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())

    def refusal(self, answer: Redriven) -> str:
        """Why the rows cannot be kept; empty if they can."""
        if answer.rows and self._folder is None:
            return "context.emit() needs a place for the rows: set output.path"
        return ""

    def keep(self, shard: str, answer: Redriven) -> None:
        """Durable when this returns. Raises: SettingsError."""
        if not answer.rows or self._folder is None:
            return
        # Two redrives may begin in the same second, also for the same shard of two streams.
        name = f"redriven-{self._began}-{shard}-{secrets.token_hex(4)}.jsonl"
        path = self._folder / name
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_unfinished(self._folder)
            publish_file(path, b"".join(encode_row_line(row) for row in answer.rows))
        except OSError as error:
            raise SettingsError(f"cannot write {path}: {error.strerror}") from None
