"""The process in which `kclrun dead-letters redrive` runs user code over letters.

The verb starts it with the environment of a lease process, so that it never imports user code
itself. One line of JSON comes for each shard, and one goes back: the letters that are done. Rows
are written here, as in a lease process: JSON would make texts of times and numbers. Those of a file
that grows go back. Output of user code goes to standard error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from kclrun.calling.in_memory.life import Life, Run
from kclrun.calling.in_memory.states import Ledger, MemoryState, Timing
from kclrun.calling.tracebacks import describe
from kclrun.codec.values import Decode, decoding
from kclrun.destinations import open_output, open_registry
from kclrun.errors import ConfigError, KclrunError, RecordError, SinkError, Superseded
from kclrun.loading import decoded_options, load_decoder, load_decoding, load_processor
from kclrun.model.lease import ClaimedLease
from kclrun.model.letter import Letter
from kclrun.model.output import MAIN_OUTPUT, OutputDestination, RowsOf, setting_of
from kclrun.model.output import redriven as redriven_from
from kclrun.model.policies import CheckpointPolicy, ErrorPolicy
from kclrun.model.row_schema import RowSchema
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.text import sanitize
from kclrun.model.time import WallTime, backoff_s
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import Output
from kclrun.processor import RecordProcessor

_ERROR_CHARACTERS_MAX: Final = 500
# As the setting `watermark` is left out. Behind the last letter no timer fires.
_TIMING: Final = Timing(lateness_s=10.0, every_s=1.0, wall_until=None)


class ServiceAccess(msgspec.Struct, frozen=True):
    """For outputs in AWS and `decode: glue`: the endpoint of the application, credentials, and the
    URL of the registry, if it is not AWS's own."""

    kinesis: WireEndpoint
    credentials: WireCredentials
    registry_url: str | None


class RedriveJob(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: the processor of a stream, and the settings it runs with.

    `places` are the outputs whose rows are written here; then each letter is a batch of its own,
    and its rows are kept apart from the next one's. `is_manual`: the processor checkpoints by
    itself. Its rows may sum up several batches, so that each letter has a processor of its own.
    """

    processor: str
    import_paths: tuple[str, ...]
    application: str
    stream: str
    options: dict[str, Any]
    retries: int
    batch_max: int
    uncheckpointed_max: int
    decode: str | None = None
    schemas: dict[str, str] = {}
    services: ServiceAccess | None = None
    places: tuple[OutputDestination, ...] = ()
    is_manual: bool = False


class Redriven(msgspec.Struct, frozen=True):
    """The answer to one shard's letters: the indexes of those that are processed and whose rows are
    durable, the rows of `output` that are not written here, and the error of the others, if any."""

    done: Sequence[int] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    error: str = ""


def serve(job_line: bytes, shards: BinaryIO, answers: BinaryIO) -> None:
    """Answer one line for each line, until the end of the input."""
    job = msgspec.json.decode(job_line, type=RedriveJob)
    try:
        paths = [Path(path) for path in job.import_paths]
        loaded: type[RecordProcessor] | str = load_processor(job.processor, paths)
        decode = None if job.decode is None else load_decoder(job.decode, paths, _registry(job))
    except KclrunError as error:
        loaded = str(error)
    outputs = LetterRows(job.places, _opener(job))
    decoder = msgspec.json.Decoder(list[Letter])
    for line in shards:
        answer = (
            Redriven(error=loaded)
            if isinstance(loaded, str)
            else redriven(job, loaded, decoder.decode(line), outputs, decode)
        )
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


def redriven(
    job: RedriveJob,
    processor: type[RecordProcessor],
    letters: Sequence[Letter],
    outputs: LetterRows,
    decode: Decode | None = None,
) -> Redriven:
    """Process the letters of one shard, in their order, and write their rows. A record that fails
    again stays a letter; if `initialize` raises, or it looks like an outage, all of them do."""
    done: list[int] = []
    rows: list[Mapping[str, Any]] = []
    problem = ""
    size = 1 if job.is_manual else len(letters)
    for first in range(0, len(letters), size):
        part = letters[first : first + size]
        try:
            run = _run(job, processor, part, decode)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - user code: also SystemExit
            problem = _short(describe(error).error)
            break
        answer = _written(job, part, run, outputs)
        done += [first + index for index in answer.done]
        rows += answer.rows
        problem = answer.error or problem
    return Redriven(done, rows, problem)


def _run(
    job: RedriveJob,
    processor: type[RecordProcessor],
    letters: Sequence[Letter],
    decode: Decode | None,
) -> Run:
    # With places, `LetterRows` refuses the rows of the letter at fault alone.
    names = None if job.places else ()
    life = Life(
        Ledger(TRIM_HORIZON, MemoryState(_TIMING), names),
        load_decoding(None, processor, [], _registry(job)) if decode is None else decoding(decode),
        concurrency=None,
        checkpoint=CheckpointPolicy(
            mode="manual" if job.is_manual else "batch", uncheckpointed_max=job.uncheckpointed_max
        ),
        batch_max=1 if job.places else job.batch_max,
        policy=ErrorPolicy(job.retries, 0.0, "skip"),
    )
    shard_id = letters[0].shard_id
    context = life.make_context(
        ClaimedLease(
            application=job.application,
            stream=job.stream,
            shard_id=shard_id,
            key=shard_id,
            position=TRIM_HORIZON,
            fencing_token=1,
        ),
        decoded_options(processor, job.options),
        {name: RowSchema.parse(text, setting_of(name)) for name, text in job.schemas.items()},
    )
    records = [letter.record for letter in letters]
    return life.live(processor, context, records, end_of_shard=False)


def _written(job: RedriveJob, letters: Sequence[Letter], run: Run, outputs: LetterRows) -> Redriven:
    """What became of the letters of a run, once their rows are written."""
    failed = {record.position for record in run.given_up}
    problem = _short(run.last_error) if failed else ""
    # Records behind the last checkpoint were not delivered: the processor gave its lease away, or
    # asked for no checkpoint.
    records = [letter.record for letter in letters]
    done = [
        index
        for index, record in enumerate(records)
        if record.position <= run.position and record.position not in failed
    ]
    if not job.places:
        return Redriven(done, run.rows, problem)
    is_main_here = any(place.name == MAIN_OUTPUT for place in job.places)
    durable: list[int] = []
    rows: list[Mapping[str, Any]] = []
    for index in done:
        of_letter = _rows_of(run, index)
        try:
            outputs.write(letters[index], of_letter)
        except LetterRefused as refused:
            problem = _short(str(refused))
            continue
        except SinkError as error:  # a destination is away, for the next letter as well
            problem = _short(str(error))
            break
        durable.append(index)
        rows += () if is_main_here else of_letter.get(MAIN_OUTPUT, ())
    return Redriven(durable, rows, problem)


def _rows_of(run: Run, index: int) -> Rows:
    """The rows of one letter, where each is a batch of its own."""
    before = run.row_counts[index - 1] if index else {}
    after = run.row_counts[index]
    return {name: run.outputs[name][before.get(name, 0) : count] for name, count in after.items()}


def _opener(job: RedriveJob) -> Open:
    kept: dict[str | None, Any] = {}

    def opened(place: OutputDestination, of: RowsOf) -> Output:
        access = job.services
        assert access is not None, "the verb gives it with outputs"
        return open_output(place, of, access.kinesis, lambda: access.credentials, kept)

    return opened


def _registry(job: RedriveJob) -> Callable[[], Decode]:
    def opened() -> Decode:
        access = job.services
        assert access is not None, "the verb gives it with `decode: glue`"
        return open_registry(access.kinesis, access.registry_url, lambda: access.credentials)

    return opened


def _short(error: str) -> str:
    return sanitize(error)[:_ERROR_CHARACTERS_MAX]


# Pauses of 0.5, 1 and 2 s: a connection is repaired in them. Its operator waits for the verb, and
# if a destination is away for longer, the letters stay: the verb is run again.
_TRIES: Final = 4
_PAUSE_S: Final = 0.5
_PAUSE_MAX_S: Final = 2.0

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
Open = Callable[[OutputDestination, RowsOf], Output]


class LetterRefused(Exception):
    """The rows of this letter cannot be written, those of another one may; in words."""


class LetterRows:
    """Writes the rows of one letter after the other to `places`, which do not grow [K20].

    A letter lies below the cursor of its shard at every destination. So its rows have an identity
    of their own, the position of its record, and are written by the outputs' own code as those of a
    shard that has this one record: they are there once, however often and by however many processes
    at the same time the letter is redriven.
    """

    def __init__(
        self,
        places: Sequence[OutputDestination],
        open_output: Open,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        # Where rows may appear again, they follow when all others are there.
        self._places = sorted(places, key=lambda place: not place.stores_cursor)
        self._open = open_output
        self._sleep = sleep

    def write(self, letter: Letter, rows: Rows) -> None:
        """The rows are durable when this returns. Raises: LetterRefused; SinkError if a destination
        is away: then some may have the rows, and will not take them again."""
        for name in rows.keys() - {place.name for place in self._places} - {MAIN_OUTPUT}:
            if rows[name]:
                raise LetterRefused(f"there is no {setting_of(name)} in the settings")
        try:
            self._write(letter, rows)
        except Superseded:
            # Another redrive wrote them at this moment, or sent rows are gone: look again.
            try:
                self._write(letter, rows)
            except Superseded as error:
                raise LetterRefused(str(error)) from None

    def _write(self, letter: Letter, rows: Rows) -> None:
        """Every row is checked by its destination before any is written."""
        record = ExtendedSequenceNumber(letter.sequence_number, letter.sub_sequence_number)
        begin, end = redriven_from(record)
        waiting: list[tuple[OutputDestination, Output, list[Any]]] = []
        with ExitStack() as opened:
            for place in self._places:
                if not rows.get(place.name):
                    continue
                with _naming(place):
                    output = opened.enter_context(closing(self._open(place, _of(letter, record))))
                    there = self._trying(partial(output.begin, begin))
                    if output.stores_cursor and there >= end:
                        continue  # a former redrive did not get to remove the letter
                    encoded = [output.encode(row)[0] for row in rows[place.name]]
                waiting.append((place, output, encoded))
            for number, (place, output, encoded) in enumerate(waiting):
                try_rows = getattr(output, "try_rows", None)
                if try_rows is not None and len(waiting) > 1:
                    before = [(other, given) for _, other, given in waiting[:number]]
                    with _naming(place):
                        self._trying(partial(try_rows, encoded, before))
            for place, output, encoded in waiting:
                with _naming(place):
                    self._trying(partial(output.add, encoded, end))
                    self._trying(output.commit)

    def _trying(self, call: Callable[[], Any]) -> Any:
        for failed in range(_TRIES - 1):
            try:
                return call()
            except Superseded:
                raise
            except SinkError:
                self._sleep(backoff_s(failed, 1.0, base_s=_PAUSE_S, max_s=_PAUSE_MAX_S))
        return call()


@contextmanager
def _naming(place: OutputDestination) -> Iterator[None]:
    """Errors of the destination, with the setting in front."""
    try:
        yield
    except (ConfigError, RecordError, TypeError) as error:
        raise LetterRefused(f"{setting_of(place.name)}: {error}") from None
    except SinkError as error:
        raise type(error)(f"{setting_of(place.name)}: {error}") from None


def _of(letter: Letter, record: ExtendedSequenceNumber) -> RowsOf:
    """All redrives have one token: none of them takes a destination from another."""
    return RowsOf(
        application=letter.application,
        stream=letter.stream,
        stream_created_at=WallTime(letter.stream_created_at),
        shard_id=letter.shard_id,
        generation=letter.generation,
        token=0,
        letter=record,
    )


if __name__ == "__main__":
    answers_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with os.fdopen(answers_fd, "wb") as pipe:
        serve(sys.stdin.buffer.readline(), sys.stdin.buffer, pipe)
