"""Opens the destinations of outputs, dead letters and state, and the schema registry.

Only this module knows which class writes where, for the fleet, for Spark and for the verbs. It is
above `aws` and `outputs`, which do not know each other, and has a class of each. What it opens is
imported when it is opened: a lease process loads botocore, SQLAlchemy or pyarrow only if an output
of its settings needs it. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kclrun.codec.values import Decode
from kclrun.errors import SettingsError
from kclrun.model.letter import LetterDestination
from kclrun.model.output import OutputDestination, RowsOf, setting_of
from kclrun.model.state import StateDestination
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import ClaimStore, LetterStore, Output, VersionStore
from kclrun.state.kept import KeptEntries, MemoryEntries


def open_output(
    place: OutputDestination,
    of: RowsOf,
    kinesis: WireEndpoint,
    credentials: Callable[[], WireCredentials],
    kept: dict[str | None, Any] | None = None,
) -> Output:
    """The destination at `place`, for the rows of `of`; sends nothing. `kinesis` is the endpoint of
    the application: the other services are used in its region. A caller that opens many outputs
    passes the same `kept` each time: clients that are slow to make stay in it.

    A file that grows (`place.grows`) is not opened here. Raises: SettingsError if an extra of
    kclrun that the destination needs is not installed.
    """
    assert not place.grows, "a file that grows is an EmittedRows"
    if place.path is not None:
        from kclrun.outputs.rolled_files import open_rolled_files

        return open_rolled_files(place, of)
    if place.sql is not None:
        with _extra("sql", place):
            from kclrun.outputs.sql import SqlOutput

        return SqlOutput(place, of)
    if place.s3 is not None:
        return _object_output(place, of, kinesis.region, credentials, kept)
    if place.use is not None:
        return open_user_output_at(place, of)
    if place.dynamodb is not None:
        from kclrun.aws.outputs.dynamodb import open_dynamodb_output

        return open_dynamodb_output(place, of, kinesis, credentials)
    if place.kinesis is not None:
        return _kinesis_output(place, of, kinesis, credentials)
    from kclrun.aws.outputs.messages import open_sender
    from kclrun.outputs.message_output import MessageOutput

    return MessageOutput(place, of, open_sender(place, kinesis.region, credentials))


def open_user_output_at(place: OutputDestination, of: RowsOf) -> Output:
    """The output of user code at `place`. Its module is found as that of the processor was, which
    this process has loaded before. Raises: ProcessorLoadError, SettingsError."""
    from kclrun.loading import decoded_options, load_output
    from kclrun.output import OutputContext
    from kclrun.outputs.user_output import key_of, open_user_output

    assert place.use is not None, "the settings name a class"
    kind = load_output(place.use, [], f"{setting_of(place.name)}.use")
    context = OutputContext(
        name=place.name,
        options=decoded_options(kind, place.options),
        application=of.application,
        stream=of.stream,
        shard_id=of.shard_id,
        key=key_of(of, place.name),
        fencing_token=of.token,
    )
    return open_user_output(kind, place.use, context)


def _object_output(
    place: OutputDestination,
    of: RowsOf,
    region: str,
    credentials: Callable[[], WireCredentials],
    kept: dict[str | None, Any] | None,
) -> Output:
    from kclrun.aws.outputs.s3 import open_object_rolls
    from kclrun.outputs.rolls import RolledOutput
    from kclrun.outputs.row_files import row_format

    form = row_format(place.format, place.schema)
    named = (form.suffix, form.content_type)
    rolls = open_object_rolls(place, of, region, credentials, named, kept=kept)
    return RolledOutput(of, form, rolls)


def _kinesis_output(
    place: OutputDestination,
    of: RowsOf,
    kinesis: WireEndpoint,
    credentials: Callable[[], WireCredentials],
) -> Output:
    from kclrun.aws.kinesis import WireStreamAdmin
    from kclrun.aws.put_records import WirePutter
    from kclrun.aws.wire import WireClient
    from kclrun.outputs.kinesis_output import KinesisOutput

    assert place.kinesis is not None, "the settings name a stream"
    client = WireClient(kinesis, credentials, service="kinesis")
    return KinesisOutput(
        place, of, WirePutter(client, place.kinesis), WireStreamAdmin(client, place.kinesis)
    )


def open_letters(
    place: LetterDestination,
    kinesis: WireEndpoint,
    credentials: Callable[[], WireCredentials],
    *,
    read_max: int | None = None,
) -> LetterStore:
    """The dead letters at `place`; sends nothing. `kinesis` is the endpoint of the application: the
    other services are used in its region. `read_max`: see `LetterStream`."""
    if place.path is not None:
        from kclrun.outputs.dead_letters import LetterFolder

        return LetterFolder(Path(place.path))
    from kclrun.aws.dead_letters import open_aws_letters

    return open_aws_letters(place, kinesis, credentials, read_max=read_max)


def open_versions(
    place: StateDestination,
    folder: str,
    kinesis: WireEndpoint,
    credentials: Callable[[], WireCredentials],
) -> VersionStore:
    """The store of the state's versions, below `folder` of its place; sends nothing."""
    if place.dynamodb is not None:
        from kclrun.aws.outputs.state_items import open_state_items

        return open_state_items(place, kinesis, credentials, folder)
    return open_claims(place, folder, kinesis, credentials)


def open_claims(
    place: StateDestination,
    folder: str,
    kinesis: WireEndpoint,
    credentials: Callable[[], WireCredentials],
) -> ClaimStore:
    """The same store where several writers may want one name, as on Spark; sends nothing. Raises:
    SettingsError for a table, whose items are written by one owner."""
    if place.path is not None:
        from kclrun.state.stores.state_files import StateFiles

        return StateFiles(Path(place.path), folder)
    if place.dynamodb is not None:
        raise SettingsError(
            f"the state in the table {place.dynamodb}: a table is for engine: fleet, where one"
            " owner writes it\nExpected a folder or s3://bucket/prefix"
        )
    from kclrun.aws.outputs.state_objects import open_state_objects

    return open_state_objects(place, kinesis.region, credentials, folder)


def open_registry(
    kinesis: WireEndpoint, url: str | None, credentials: Callable[[], WireCredentials]
) -> Decode:
    """The schema registry of the region of `kinesis`, or at `url`. Raises: SettingsError."""
    from kclrun.aws.glue import decoder

    return decoder.open_registry(kinesis.region, url, credentials)


def open_kept(
    place: StateDestination, folder: str, shard_id: str, broke: Callable[[BaseException], None]
) -> KeptEntries:
    """The place of the entries of the last version: memory, or below `folder` of the local disk.
    Raises: SinkError."""
    if place.local is None:
        return MemoryEntries()
    from kclrun.state.stores.local_state import LocalEntries, sweep

    local = Path(place.local) / folder
    sweep(local, place.retain_s)
    return LocalEntries(local / shard_id, place.memory_bytes, broke)


@contextmanager
def _extra(name: str, place: OutputDestination) -> Iterator[None]:
    """Raises: SettingsError if a package of this extra of kclrun is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"the output {place.name} needs the package {error.name}\n"
            f"Install it with  pip install 'kclrun[{name}]'"
        ) from None
