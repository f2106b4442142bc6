"""A lease table laid out as the Java KCL 2.x writes it, attribute for attribute."""

WORKER = "ip-10-0-3-7.ec2.internal:1f0b3c1e-8a52-4b56-9f0e-2f4f6a1c77d0"


class JavaTable:
    """Made and filled as by a worker that is gone since: its leases are still its own."""

    def __init__(self, dynamodb, kinesis, table, stream):
        self._dynamodb = dynamodb
        self._table = table
        self._shards = {
            shard["ShardId"]: shard for shard in kinesis.list_shards(StreamName=stream)["Shards"]
        }
        dynamodb.create_table(
            TableName=table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        )

    def put(self, shard_id, checkpoint, sub=0, *, counter=417, owner=WORKER, children=()):
        """One row. Parents and the hash range are those of the shard."""
        shard = self._shards[shard_id]
        parents = [shard[key] for key in ("ParentShardId", "AdjacentParentShardId") if key in shard]
        item = {
            "leaseKey": {"S": shard_id},
            "leaseCounter": {"N": str(counter)},
            "ownerSwitchesSinceCheckpoint": {"N": "0"},
            "checkpoint": {"S": checkpoint},
            "checkpointSubSequenceNumber": {"N": str(sub)},
            "startingHashKey": {"S": shard["HashKeyRange"]["StartingHashKey"]},
            "endingHashKey": {"S": shard["HashKeyRange"]["EndingHashKey"]},
        }
        if owner is not None:
            item["leaseOwner"] = {"S": owner}
        if parents:
            item["parentShardId"] = {"SS": parents}
        if children:
            item["childShardIds"] = {"SS": list(children)}
        self._dynamodb.put_item(TableName=self._table, Item=item)

    def run_by_kcl_3(self):
        """As a fleet of the KCL 3.5 leaves it: its mode, its leader and a worker's metrics as rows,
        and a lease with a throughput."""
        for item in (
            {"leaseKey": {"S": "Migration3.0"}, "cv": {"S": "CLIENT_VERSION_3X"},
             "mb": {"S": WORKER}, "mts": {"N": "1780000000000"},
             "entityType": {"S": "CLIENT_VERSION_MIGRATION"}},
            {"leaseKey": {"S": "Leader"}, "ownerName": {"S": WORKER},
             "leaseDuration": {"S": "120000"}, "entityType": {"S": "LEADER"}},
            {"leaseKey": {"S": WORKER}, "lut": {"N": "1780000000"},
             "sts": {"M": {"C": {"L": [{"N": "12.5"}]}}},
             "entityType": {"S": "WORKER_METRIC_STATS"}},
        ):  # fmt: skip
            self._dynamodb.put_item(TableName=self._table, Item=item)
        for shard_id in self._shards:
            self._dynamodb.update_item(
                TableName=self._table,
                Key={"leaseKey": {"S": shard_id}},
                UpdateExpression="SET throughputKBps = :kbps, entityType = :lease",
                ExpressionAttributeValues={":kbps": {"N": "1.0E-4"}, ":lease": {"S": "LEASE"}},
            )

    def forget_the_mode(self):
        """As an operator does once no worker of the KCL 3 runs any more."""
        self._dynamodb.delete_item(TableName=self._table, Key={"leaseKey": {"S": "Migration3.0"}})

    def item(self, shard_id):
        """The row as it lies in the table, with its types."""
        return self._dynamodb.get_item(
            TableName=self._table, Key={"leaseKey": {"S": shard_id}}, ConsistentRead=True
        ).get("Item")

    def steal(self, shard_id):
        """As a Java worker that takes more than its share: owner and counter, by force."""
        self._dynamodb.update_item(
            TableName=self._table,
            Key={"leaseKey": {"S": shard_id}},
            UpdateExpression="SET leaseOwner = :me ADD leaseCounter :one",
            ExpressionAttributeValues={":me": {"S": WORKER}, ":one": {"N": "1"}},
        )
