"""The ledger of changes of a DynamoDB table: the items' versions, and each image as a row."""

import json

from ledger_processor import Ledger


def version_of(event):
    """An item and its version `n`: a removal is one more than the image it removed."""
    change = event["dynamodb"]
    image = change.get("NewImage")
    n = int(image["n"]["N"]) if image else int(change["OldImage"]["n"]["N"]) + 1
    return change["Keys"]["id"]["S"], n, image


class Changes(Ledger):
    def process_records(self, batch, checkpointer):
        records = []
        for record in batch:
            event = record.value
            assert event == json.loads(record.data)
            key, n, image = version_of(event)
            assert record.partition_key == json.dumps({"id": {"S": key}}, separators=(",", ":"))
            records.append([record.sequence_number, key, n])
            self.context.emit({"key": key, "n": n, "image": image})
        self.write("batch", at=0.0, records=records)
