"""The dead letters of an application: where they are kept, and the letter of a record."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kclrun.aws.wire import WireClient
from kclrun.ipc.board import StartSpec
from kclrun.ipc.messages import ERROR_BYTES_MAX, TRACEBACK_BYTES_MAX
from kclrun.model.letter import LETTER_VERSION, Letter, LetterPlace
from kclrun.model.record import Record
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.observe.failures import Failure
from kclrun.ports import LetterStore
from kclrun.sinks.dead_letters import LetterFolder


def open_letters(
    place: LetterPlace, kinesis: WireEndpoint, credentials: Callable[[], WireCredentials]
) -> LetterStore:
    """The letters at this place; sends nothing. `kinesis` is the application's endpoint: S3, SQS
    and a stream of letters are used in its region."""
    if place.path is not None:
        return LetterFolder(Path(place.path))
    # Here, because these load botocore: a lease process without such letters does not.
    from kclrun.aws.control import ControlPlane, RenewedClient
    from kclrun.aws.dead_letters import LetterBucket, LetterQueue, LetterStream
    from kclrun.aws.endpoints import EndpointSettings

    bucket = None
    if place.s3 is not None:
        s3 = EndpointSettings(region=kinesis.region, endpoint_url=place.s3_url)
        bucket = LetterBucket(RenewedClient(s3, credentials, ControlPlane.s3), place.s3)
    if place.sqs is not None:
        sqs = EndpointSettings(region=kinesis.region, endpoint_url=place.sqs_url)
        return LetterQueue(RenewedClient(sqs, credentials, ControlPlane.sqs), place.sqs, bucket)
    if place.stream is not None:
        client = WireClient(kinesis, credentials, service="kinesis")
        return LetterStream(client, place.stream, bucket)
    assert bucket is not None, "the settings name a place"
    return bucket


def letter_of(spec: StartSpec, record: Record, failure: Failure, calls: int) -> Letter:
    """The letter of a record that was given up after `calls` calls had raised with it."""
    return Letter(
        version=LETTER_VERSION,
        application=spec.application,
        processor=spec.processor,
        stream=spec.stream_name,
        shard_id=spec.shard_id,
        sequence_number=record.sequence_number,
        sub_sequence_number=record.sub_sequence_number,
        partition_key=record.partition_key,
        explicit_hash_key=record.explicit_hash_key,
        arrived_at=record.approximate_arrival_timestamp,
        data=record.data,
        error=failure.error[:ERROR_BYTES_MAX],
        raised_at=failure.raised_at,
        traceback=failure.traceback_text[-TRACEBACK_BYTES_MAX:],
        calls=calls,
        given_up_at=time.time(),
    )
