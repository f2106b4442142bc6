"""What botocore raises, as a leaf of our tree: by what the service said, or said not."""

import pytest
from botocore.exceptions import ClientError

from kclrun.aws.boto_errors import from_botocore
from kclrun.aws.operations import CREATE_TABLE, GET_ITEM
from kclrun.errors import AccessDenied, InvalidRequest, NotFound, OutcomeUnknown, Unavailable


def refused(status, code, message=""):
    answer = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, "GetItem")


@pytest.mark.parametrize(
    ("error", "leaf"),
    [
        (refused(400, "ResourceNotFoundException"), NotFound),
        (refused(400, "ValidationException", "no"), InvalidRequest),
        (refused(403, "403"), AccessDenied),
        (refused(404, "404"), InvalidRequest),
        (refused(503, "503"), Unavailable),
        (refused(503, "400"), Unavailable),
        (refused(401, "SomethingNew"), AccessDenied),
    ],
)
def test_what_the_service_named_is_what_it_is(error, leaf):
    assert type(from_botocore(GET_ITEM, error)) is leaf


def test_a_400_that_names_no_error_was_cut_off_inside_its_head_and_says_nothing():
    read = from_botocore(GET_ITEM, refused(400, "400"))
    write = from_botocore(CREATE_TABLE, refused(400, "400"))

    assert (type(read), type(write)) == (Unavailable, OutcomeUnknown)
    assert "cut short" in str(read)
