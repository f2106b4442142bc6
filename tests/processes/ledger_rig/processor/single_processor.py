"""Processors of single records, which note each call that returned, in one file for all."""

import asyncio
import os
import random
import time
from pathlib import Path

import msgspec

from kclrun import RecordProcessor


class _Noting(RecordProcessor):
    def initialize(self, context):
        self._notes = os.open(context.options["calls"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._poisons = frozenset(context.options.get("poisons", ()))
        self._stuck = context.options.get("stuck")
        self._cure = Path(context.options["cure"])
        self._chance = random.Random(5)

    def pause_s(self):
        return self._chance.random() * 0.004

    def is_stuck(self, data):
        return f"{data['key']}:{data['n']}" == self._stuck and not self._cure.exists()

    def done(self, data, context):
        """The record, whose call is about to return; its note is one write."""
        if f"{data['key']}:{data['n']}" in self._poisons:
            raise ValueError("this record is poison")
        context.emit({"key": data["key"], "n": data["n"]})
        os.write(self._notes, f"{os.getpid()} {data['key']} {data['n']}\n".encode())


class Tasks(_Noting):
    async def process_record(self, record, context):
        data = msgspec.json.decode(record.data)
        await asyncio.sleep(self.pause_s())
        if self.is_stuck(data):
            await self.stands_still()
        self.done(data, context)

    async def stands_still(self):
        await asyncio.Event().wait()


class Threads(_Noting):
    def process_record(self, record, context):
        data = msgspec.json.decode(record.data)
        time.sleep(self.pause_s())
        self.done(data, context)
