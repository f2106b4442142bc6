"""The places that rows go to, for the contract of `ports.Output`. A new place is a subclass of
`Place` and a row of `PLACES`.

Its rows have the columns of `SCHEMA`: the shard says whose row it is, and `n` counts from 1.
"""

import csv
import errno
import functools
import io
import itertools
import json
from pathlib import Path

from botocore.exceptions import ClientError, ReadTimeoutError
from pyarrow import parquet

from kclrun.aws.control import ControlPlane, RenewedClient
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.outputs.s3 import PART_BYTES, ObjectRolls
from kclrun.codec.row_lines import encode_row_line
from kclrun.errors import SettingsError, SinkError, Superseded
from kclrun.model.output import OutputDestination, RowsOf
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials
from kclrun.outputs.rolled_files import open_rolled_files
from kclrun.outputs.rolls import RolledOutput
from kclrun.outputs.row_files import row_format

SCHEMA = "shard string NOT NULL, n long"
NUMBERS = itertools.count()


class Place:
    """One destination, empty at first; `aws` is the embedded AWS (`needs_aws`)."""

    needs_aws = False
    needs_postgres = needs_mariadb = False  # `aws` is then the server
    schema = None  # the rows are checked against it before they are encoded
    # The faults that `fail` knows. The next write at the destination meets it, or the next `times`:
    #   refused        a definite no, without an effect
    #   throttled      the same with the words of an overload
    #   lost request   no answer; the request never arrives
    #   lost reply     no answer; the request was applied
    #   late           no answer; the request arrives when the test calls `land`
    #   a proxy's page status 200 without what the service answers; the request never arrives
    faults = frozenset()

    def __init__(self, aws, folder):
        self.aws = aws
        self.folder = folder
        self.name = f"rows-{next(NUMBERS)}"

    def open(self, of):
        """The Output of one owner, before its `begin`."""
        raise NotImplementedError

    def open_missing(self):
        """An Output whose destination is not there (no bucket, no table), or None if that cannot
        be."""

    def rows(self):
        """All rows as a reader finds them: those of a shard in the order of their records."""
        raise NotImplementedError

    def fail(self, fault, times=1):
        """The next writes meet this fault."""
        raise NotImplementedError

    def land(self):
        """The requests that are `late` arrive now, in their order; what becomes of them is told to
        no sender."""

    def close(self):
        """After the test."""


class FaultyClient:
    """A botocore client whose calls named in `writes` meet the faults of `Place`."""

    def __init__(self, client, writes):
        self._client = client
        self._writes = writes
        self._faults = []
        self._late = []

    def fail(self, fault, times=1):
        self._faults += [fault] * times

    def watch(self, *names):
        """These calls meet the faults from now on, and only these."""
        self._writes = {*names}

    def land(self):
        late, self._late = self._late, []
        for call in late:
            try:
                call()
            except ClientError:
                pass

    def __getattr__(self, name):
        call = getattr(self._client, name)
        return functools.partial(self._meet, name, call) if name in self._writes else call

    def _meet(self, name, call, **arguments):
        fault = self._faults.pop(0) if self._faults else None
        match fault:
            case None:
                return call(**arguments)
            case "lost reply":
                call(**arguments)
            case "late":
                self._late.append(functools.partial(call, **arguments))
            case "lost request":
                pass
            case "a proxy's page":
                return {"ResponseMetadata": {"HTTPStatusCode": 200}}
            case _:
                code, status = REFUSALS[fault]
                raise ClientError(
                    {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, name
                )
        raise ReadTimeoutError(endpoint_url="http://127.0.0.1")


REFUSALS = {
    "refused": ("AccessDenied", 403),
    "throttled": ("SlowDown", 503),
    "conflict": ("ConditionalRequestConflict", 409),
}


class Reference(Place):
    """What the contract means, in memory: a destination that fences by token, as SQL does."""

    faults = frozenset({"throttled", "lost request", "lost reply", "late"})

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._rows = []
        self._cursors = {}
        self._tokens = {}
        self._faults = []
        self._late = []

    def open(self, of):
        return _ReferenceOutput(self, of)

    def rows(self):
        return list(self._rows)

    def fail(self, fault, times=1):
        self._faults += [fault] * times

    def land(self):
        late, self._late = self._late, []
        for transaction in late:
            transaction()

    def take_over(self, key, token, at):
        if self._tokens.get(key, 0) > token:
            raise SettingsError(f"the token {self._tokens[key]} at the destination is above ours")
        self._tokens[key] = token
        return self._cursors.setdefault(key, at)

    def send(self, key, token, began, end, rows):
        def apply():
            if (self._tokens[key], self._cursors[key]) == (token, began):
                self._cursors[key] = end
                self._rows += rows

        fault = self._faults.pop(0) if self._faults else None
        if fault == "late":
            self._late.append(apply)
        elif fault in {None, "lost reply"}:
            apply()
        if fault is not None:
            raise SinkError(fault)
        if self._tokens[key] != token or self._cursors[key] != end:
            raise Superseded("another owner has taken over")


class _ReferenceOutput:
    stores_cursor = True

    def __init__(self, store, of):
        self._store = store
        self._token = of.token
        self._key = (of.application, of.stream, of.stream_created_at, of.shard_id, of.generation)
        self._pending = []
        self._sealed = None

    def encode(self, row):
        return dict(row), len(encode_row_line(row))

    def begin(self, at):
        self._stored = self._upto = self._store.take_over(self._key, self._token, at)
        return self._stored

    def add(self, rows, upto):
        self._pending += rows
        self._upto = upto

    @property
    def unsent_bytes(self):
        return sum(len(encode_row_line(row)) for row in (self._sealed or [])) + sum(
            len(encode_row_line(row)) for row in self._pending
        )

    def commit(self):
        while self._sealed or self._pending:
            if not self._sealed:
                self._sealed, self._end, self._pending = self._pending, self._upto, []
            self._store.send(self._key, self._token, self._stored, self._end, self._sealed)
            self._stored, self._sealed = self._end, None
        return self._stored

    def check(self):
        return "memory"

    def close(self):
        self._pending.clear()


KEYS = WireCredentials("key", "secret")


class Rolls(Place):
    """Rolls of a format."""

    format = "json"
    schema = SCHEMA

    def of_place(self, **more):
        return OutputDestination(name="output", format=self.format, schema=self.schema, **more)

    def read(self, contents):
        return [row for content in contents for row in _READ[self.format](content)]


def _csv(content):
    return [{**row, "n": int(row["n"])} for row in csv.DictReader(content.decode().splitlines())]


_READ = {
    "json": lambda content: [json.loads(line) for line in content.splitlines()],
    "csv": _csv,
    "parquet": lambda content: parquet.read_table(io.BytesIO(content)).to_pylist(),
}


class Objects(Rolls):
    """A bucket, with a client in front that loses, delays and refuses requests."""

    needs_aws = True
    faults = frozenset({*REFUSALS, "lost request", "lost reply", "late", "a proxy's page"})

    def __init__(self, aws, folder):
        super().__init__(aws, folder)
        endpoint = EndpointSettings(region="us-east-1", endpoint_url=aws.endpoint)
        self.s3 = RenewedClient(endpoint, lambda: KEYS, ControlPlane.s3)()
        self.s3.create_bucket(Bucket=self.name)
        self.faulty = FaultyClient(self.s3, {"put_object", "complete_multipart_upload"})
        self.fail, self.land = self.faulty.fail, self.faulty.land

    def open(self, of):
        return self._open(of, self.name)

    def open_missing(self):
        return self._open(OF_NOBODY, f"{self.name}-missing")

    def _open(self, of, bucket):
        place = self.of_place(s3=f"s3://{bucket}/some/prefix")
        form = row_format(place.format, place.schema)
        named = (form.suffix, form.content_type)
        return RolledOutput(of, form, ObjectRolls(lambda: self.faulty, place.s3, of, named))

    def names(self):
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [each["Key"] for page in pages for each in page.get("Contents", ())]

    def rows(self):
        keys = [key for key in self.names() if "/_kclrun/" not in key]
        got = (self.s3.get_object(Bucket=self.name, Key=key)["Body"].read() for key in keys)
        return self.read(got)

    def close(self):
        self.s3.close()


class Parts(Objects):
    """Some rows are large enough for a part of their own."""

    def open(self, of):
        return _Widened(super().open(of))


class _Widened:
    """An output some of whose rows are lines with many spaces behind them."""

    def __init__(self, output):
        self._output = output

    def encode(self, row):
        line, _ = self._output.encode(row)
        if row["n"] in {3, 4, 6, 40}:
            line = line.rstrip() + b" " * PART_BYTES + b"\n"
        return line, len(line)

    def __getattr__(self, name):
        return getattr(self._output, name)


class ParquetObjects(Objects):
    format = "parquet"


class Files(Rolls):
    """A folder. An answer is never lost there, but on a file server it may be."""

    faults = frozenset({"throttled", "lost reply"})

    def __init__(self, aws, folder):
        super().__init__(aws, folder)
        self._faults = []
        self.name = folder.name
        self._link = Path.hardlink_to
        meet = self._meet

        def hardlink_to(path, target):
            meet(path, target)

        Path.hardlink_to = hardlink_to

    def open(self, of):
        return open_rolled_files(self.of_place(path=str(self.folder / "rows")), of)

    def rows(self):
        paths = sorted((self.folder / "rows").glob("**/[!.]*.*"))
        return self.read(path.read_bytes() for path in paths)

    def fail(self, fault, times=1):
        self._faults += [fault] * times

    def _meet(self, path, target):
        fault = self._faults.pop(0) if self._faults else None
        if fault != "throttled":
            self._link(path, target)
        if fault is not None:
            raise OSError(errno.EIO, "made for the test")

    def close(self):
        Path.hardlink_to = self._link


class CsvFiles(Files):
    format = "csv"


OF_NOBODY = RowsOf(
    application="a",
    stream="s",
    stream_created_at=WallTime(0.0),
    shard_id="shardId-0",
    generation=0,
    token=1,
)

PLACES = {
    "reference": Reference,
    "s3": Objects,
    "s3 in parts": Parts,
    "s3 parquet": ParquetObjects,
    "files": Files,
    "files csv": CsvFiles,
}
