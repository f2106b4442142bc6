"""Refusals of services: a 401 or 403 is a permission, whatever its code."""

import itertools

import pytest
from botocore.exceptions import ClientError

from kclrun.aws import operations
from kclrun.aws.control import ControlPlane, RenewedClient, from_botocore
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.errors import ErrorReply, service_error
from kclrun.aws.operations import Operation
from kclrun.aws.outputs.s3 import Bucket
from kclrun.cli.destination_checks import checked
from kclrun.cli.exit_codes import exit_code_of
from kclrun.errors import AccessDenied, InvalidRequest, NotFound
from kclrun.model.wire import WireCredentials
from tests.support.tables import over_rows

KEYS = WireCredentials("AKID", "secret")
OPERATIONS = [each for each in vars(operations).values() if isinstance(each, Operation)]
CODES = [
    "",
    "403",
    "Forbidden",
    "Nope",
    "XAdminUserNotFound",
    "InvalidAccessKeyId",
    "NoSuchBucket",
    "ResourceNotFoundException",
    "ValidationException",
    "PreconditionFailed",
]


def client_error(code, status, headers=()):
    return ClientError(
        {
            "Error": {"Code": code, "Message": "as it says"},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": dict(headers)},
        },
        "Operation",
    )


@over_rows(("operation", "status"), itertools.product(OPERATIONS, [401, 403]))
def test_a_401_or_403_is_a_permission_whatever_its_code(operation, status):
    for code in CODES:
        ours = service_error(operation, ErrorReply(code=code), status)
        botocores = from_botocore(operation, client_error(code, status))
        for error in (ours, botocores):
            assert isinstance(error, AccessDenied), (code, error)
            assert exit_code_of(error) == 77


@pytest.mark.parametrize("code", ["XAdminUserNotFound", "NoSuchAccessKey", "InvalidCredentials"])
def test_a_caller_that_a_server_does_not_know_is_a_permission_with_any_status(code):
    for status in (400, 404):
        assert isinstance(
            from_botocore(operations.PUT_OBJECT, client_error(code, status)), AccessDenied
        )


@pytest.mark.parametrize(
    ("code", "kind"),
    [("ResourceNotFoundException", NotFound), ("ValidationException", InvalidRequest)],
)
def test_what_is_not_about_the_caller_stays_what_it_is(code, kind):
    assert type(from_botocore(operations.PUT_OBJECT, client_error(code, 400))) is kind


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("code", ["XAdminUserNotFound", "InvalidAccessKeyId", "NoSuchBucket"])
def test_the_check_of_a_bucket_that_refuses_the_keys_advises_to_create_nothing(
    status, code, server
):
    body = f"<Error><Code>{code}</Code><Message>it says</Message></Error>".encode()
    server.reply(status, body, headers={"Content-Type": "application/xml"})
    settings = EndpointSettings(region="eu-west-1", endpoint_url=server.url)
    client = RenewedClient(settings, lambda: KEYS, ControlPlane.s3)

    with pytest.raises(AccessDenied, match=f"outputs.x: .*{code}: it says") as raised:
        checked("outputs.x", lambda: Bucket(client, "s3://bucket/rows"))

    assert "reate it" not in str(raised.value)
    assert "create the bucket" not in str(raised.value)
