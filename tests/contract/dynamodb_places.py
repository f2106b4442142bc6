"""Items of a DynamoDB table, for the contract of `ports.Output`."""

import json

from kclrun.aws import operations
from kclrun.aws.control import ControlPlane, RenewedClient
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.errors import ErrorReply
from kclrun.aws.outputs import dynamodb, item_tables
from kclrun.aws.wire import RefusedReply
from kclrun.errors import OutcomeUnknown
from kclrun.model.output import OutputDestination
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.contract.output_places import Place

KEYS = WireCredentials("key", "secret")
CODES = {
    "refused": ("AccessDeniedException", 400),
    "throttled": ("ProvisionedThroughputExceededException", 400),
}


class Items(Place):
    needs_aws = True
    faults = frozenset({"refused", "throttled", "lost request", "lost reply", "late"})

    def __init__(self, aws, folder):
        super().__init__(aws, folder)
        self._opened, self._faults, self._late = [], [], []
        settings = EndpointSettings(region="us-east-1", endpoint_url=aws.endpoint)
        self.client = RenewedClient(settings, lambda: KEYS, ControlPlane.dynamodb_writes)()
        keys = {"shard": ("S", "HASH"), "n": ("N", "RANGE")}
        self.client.create_table(
            TableName=self.name,
            KeySchema=[
                {"AttributeName": name, "KeyType": role} for name, (_, role) in keys.items()
            ],
            AttributeDefinitions=[
                {"AttributeName": name, "AttributeType": kind} for name, (kind, _) in keys.items()
            ],
            BillingMode="PAY_PER_REQUEST",
        )

    def open(self, of, **changed):
        reported = {"dynamodb": self.name, "endpoint_url": self.aws.endpoint} | changed
        kinesis = WireEndpoint(self.aws.kinesis_endpoint, "us-east-1", "us-east-1")
        output = dynamodb.open_dynamodb_output(
            OutputDestination(name="output", **reported), of, kinesis, lambda: KEYS
        )
        self._opened.append(output)
        output._sleep = lambda _: None
        ask = output._client.ask
        output._client.ask = lambda operation, body: self._meet(ask, operation, body)
        return output

    def open_missing(self):
        from tests.contract.test_outputs import OF

        return self.open(OF, dynamodb="missing")

    def close(self):
        for each in self._opened:
            each.close()

    def items(self):
        found = self.client.scan(TableName=self.name, ConsistentRead=True)["Items"]
        return [{name: plain(each) for name, each in item.items()} for item in found]

    def rows(self):
        rows = ({k: v for k, v in item.items() if k != dynamodb.MARK} for item in self.items())
        return sorted(rows, key=lambda row: (row["shard"], row["n"]))

    def fail(self, fault, times=1):
        # A lost answer or an overload is met once more within the commit: it fails after its tries.
        more = 1 if fault == "refused" else item_tables.TRIES
        self._faults += [fault] * times * more

    def land(self):
        late, self._late = self._late, []
        for ask, operation, body in late:
            ask(operation, body)

    def _meet(self, ask, operation, body):
        if operation is not operations.PUT_ITEM:
            return ask(operation, body)
        fault = self._faults.pop() if self._faults else None
        match fault:
            case None:
                return ask(operation, body)
            case "lost reply":
                ask(operation, body)
            case "late":
                self._late.append((ask, operation, body))
            case "refused" | "throttled":
                code, status = CODES[fault]
                return RefusedReply(status, ErrorReply(code=code, message=f"of {self.name}"))
        raise OutcomeUnknown("no answer", operation=operation.name)


def plain(attribute):
    [(kind, value)] = attribute.items()
    if kind == "N":
        return json.loads(value)
    return {name: plain(each) for name, each in value.items()} if kind == "M" else value


PLACES = {"dynamodb": Items}
