"""The process in which `kclrun dead-letters redrive` runs user code over letters.

The verb starts it with the environment of a lease process, so that it never imports user code
itself. One line of JSON comes for each shard, and one goes back: the letters that were processed,
and their rows. Output of user code goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from kclrun.codec.values import Decode
from kclrun.errors import KclrunError
from kclrun.loading import load_decoder, load_processor
from kclrun.model.letter import Letter
from kclrun.model.text import harmless
from kclrun.model.wire import WireCredentials
from kclrun.observe.failures import describe
from kclrun.processor import RecordProcessor
from kclrun.testing.runs import run_processor

_ERROR_CHARACTERS_MAX: Final = 500


class RegistryAccess(msgspec.Struct, frozen=True):
    """For `decode: glue`: where the registry is, if not at AWS's own URL, and credentials."""

    region: str
    url: str | None
    credentials: WireCredentials


class RedriveJob(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: the processor of a stream, and the settings it runs with."""

    processor: str
    import_paths: tuple[str, ...]
    application: str
    stream: str
    options: dict[str, Any]
    retries: int
    batch_max: int
    uncheckpointed_max: int
    decode: str | None = None
    schema: str | None = None
    registry: RegistryAccess | None = None


class Redriven(msgspec.Struct, frozen=True):
    """The answer to one shard's letters: the indexes of those that are processed, the rows emitted
    for them, and the error of the others, if any."""

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
    decoder = msgspec.json.Decoder(list[Letter])
    for line in shards:
        answer = (
            Redriven(error=loaded)
            if isinstance(loaded, str)
            else redriven(job, loaded, decoder.decode(line), decode)
        )
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


def redriven(
    job: RedriveJob,
    processor: type[RecordProcessor],
    letters: Sequence[Letter],
    decode: Decode | None = None,
) -> Redriven:
    """Process the letters of one shard, in their order. A record that fails again stays a letter;
    if `initialize` raises, or it looks like an outage, all of them do."""
    records = [letter.record for letter in letters]
    try:
        run = run_processor(
            processor,
            records,
            options=job.options,
            application=job.application,
            stream=job.stream,
            shard_id=letters[0].shard_id,
            checkpoint="batch",
            batch_max=job.batch_max,
            uncheckpointed_max=job.uncheckpointed_max,
            retries=job.retries,
            then="skip",
            end_of_shard=False,
            decode=decode,
            schema=job.schema,
            seed=None,
        )
    except Exception as error:  # noqa: BLE001 - user code
        return Redriven(error=_short(describe(error).error))
    failed = {record.position for record in run.given_up}
    # Records behind the last checkpoint were not delivered: the processor gave its lease away.
    done = [
        index
        for index, record in enumerate(records)
        if record.position <= run.position and record.position not in failed
    ]
    return Redriven(done, run.rows, _short(run.last_error) if failed else "")


def _registry(job: RedriveJob) -> Callable[[], Decode]:
    def opened() -> Decode:
        from kclrun.aws.glue.decoder import open_registry

        access = job.registry
        assert access is not None, "the verb gives it with `decode: glue`"
        return open_registry(access.region, access.url, lambda: access.credentials)

    return opened


def _short(error: str) -> str:
    return harmless(error)[:_ERROR_CHARACTERS_MAX]


if __name__ == "__main__":
    answers_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with os.fdopen(answers_fd, "wb") as pipe:
        serve(sys.stdin.buffer.readline(), sys.stdin.buffer, pipe)
