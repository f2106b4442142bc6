"""`amazon_kclpy.messages`: the arguments of a processor's methods.

Each is made from the JSON object that the MultiLangDaemon would send, so that tests written for
`amazon_kclpy` can still make them. Delivered records are read from the record itself.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar, Final

from kclrun.model import record as model

__all__ = [
    "DeliveredRecord",
    "InitializeInput",
    "LeaseLostInput",
    "ProcessRecordsInput",
    "Record",
    "ShardEndedInput",
    "ShutdownInput",
    "ShutdownRequestedInput",
]

Fields = Mapping[str, Any]
_NOTHING: Final[Fields] = {}
# The fields of a record in JSON, each with its attribute.
_ATTRIBUTES: Final[Mapping[str, str]] = {
    "data": "data",
    "partitionKey": "partition_key",
    "sequenceNumber": "sequence_number",
    "subSequenceNumber": "sub_sequence_number",
    "approximateArrivalTimestamp": "timestamp_millis",
}


class _Input:
    """A message by its fields; `dispatch` calls its method of the processor."""

    def __init__(self, json_dict: Fields = _NOTHING) -> None:
        self._fields = json_dict

    @property
    def action(self) -> Any:
        return self._fields.get("action")


class _InputWithCheckpointer(_Input):
    _method: ClassVar[str]

    def __init__(self, json_dict: Fields = _NOTHING, checkpointer: Any = None) -> None:
        super().__init__(json_dict)
        self._checkpointer = checkpointer

    @property
    def checkpointer(self) -> Any:
        """Valid during this call."""
        return self._checkpointer

    def dispatch(self, checkpointer: Any, record_processor: Any) -> None:
        self._checkpointer = checkpointer
        getattr(record_processor, self._method)(self)


class InitializeInput(_Input):
    """The shard and its start: `sequence_number` is the checkpoint, or a sentinel's name."""

    @property
    def shard_id(self) -> Any:
        return self._fields["shardId"]

    @property
    def sequence_number(self) -> Any:
        return self._fields["sequenceNumber"]

    @property
    def sub_sequence_number(self) -> Any:
        return self._fields["subSequenceNumber"]

    def dispatch(self, _checkpointer: Any, record_processor: Any) -> None:
        record_processor.initialize(self)


class ProcessRecordsInput(_InputWithCheckpointer):
    """Some records of the shard, in order."""

    _method = "process_records"

    @property
    def records(self) -> Any:
        return self._fields["records"]

    @property
    def millis_behind_latest(self) -> Any:
        """How far behind the tip the records were when they were read, or None."""
        return self._fields["millisBehindLatest"]


class LeaseLostInput(_InputWithCheckpointer):
    """Another owner has the shard. Its checkpointer refuses; interface 2 gets it."""

    _method = "lease_lost"


class ShardEndedInput(_InputWithCheckpointer):
    """All records of the shard were delivered; a checkpoint is due."""

    _method = "shard_ended"


class ShutdownRequestedInput(_InputWithCheckpointer):
    """The lease is about to be given away: the last chance to checkpoint."""

    _method = "shutdown_requested"


class ShutdownInput(_InputWithCheckpointer):
    """The end of interface 2: `TERMINATE` (the shard ended) or `ZOMBIE` (the lease is lost)."""

    def __init__(self, reason: str, checkpointer: Any) -> None:
        super().__init__({"action": "shutdown"}, checkpointer)
        self.reason = reason

    @staticmethod
    def terminate(checkpointer: Any) -> ShutdownInput:
        """The shard ended: checkpoint."""
        return ShutdownInput("TERMINATE", checkpointer)

    @staticmethod
    def zombie(checkpointer: Any = None) -> ShutdownInput:
        """The lease is lost: write nothing."""
        return ShutdownInput("ZOMBIE", checkpointer)


class Record:
    """One record, by its JSON object; `record["partitionKey"]` and `record.get(...)` as well."""

    def __init__(self, json_dict: Fields) -> None:
        self._fields = json_dict

    @property
    def data(self) -> str:
        """The payload in base64."""
        return str(self._fields["data"])

    @property
    def binary_data(self) -> bytes:
        return base64.b64decode(self.data)

    @property
    def partition_key(self) -> str:
        return str(self._fields["partitionKey"])

    @property
    def sequence_number(self) -> str:
        return str(self._fields["sequenceNumber"])

    @property
    def sub_sequence_number(self) -> int:
        return int(self._fields["subSequenceNumber"])

    @property
    def timestamp_millis(self) -> int:
        return int(self._fields["approximateArrivalTimestamp"])

    @property
    def approximate_arrival_timestamp(self) -> datetime:
        """The same as a datetime without a zone, in the machine's time zone: as in
        `amazon_kclpy`."""
        return datetime.fromtimestamp(self.timestamp_millis / 1000)  # noqa: DTZ006

    def get(self, field: str) -> Any:
        """By the field's name in JSON. Raises: KeyError."""
        return self._fields[field]

    def __getitem__(self, field: str) -> Any:
        return self.get(field)


class DeliveredRecord(Record):
    """A record that was read: nothing is encoded before it is used."""

    __slots__ = ("_record",)

    def __init__(self, record: model.Record) -> None:
        self._record = record

    @property
    def data(self) -> str:
        return base64.b64encode(self._record.data).decode("ascii")

    @property
    def binary_data(self) -> bytes:
        return self._record.data

    @property
    def partition_key(self) -> str:
        return self._record.partition_key

    @property
    def sequence_number(self) -> str:
        return self._record.sequence_number

    @property
    def sub_sequence_number(self) -> int:
        return self._record.sub_sequence_number

    @property
    def timestamp_millis(self) -> int:
        return round(self._record.approximate_arrival_timestamp * 1000)

    def get(self, field: str) -> Any:
        if field == "action":
            return "record"
        return getattr(self, _ATTRIBUTES[field])
