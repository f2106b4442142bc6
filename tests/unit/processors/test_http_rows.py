import json

import pytest

from kclrun.errors import SettingsError, SinkError
from kclrun.model.output import Cursor
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.output import OutputContext
from kclrun.outputs.user_output import open_user_output
from kclrun.testing import assert_output_contract
from processors.http_rows import HttpOptions, HttpRows
from tests.support.http_service import HttpService

AT = Cursor(TRIM_HORIZON)


class Api:
    """Takes rows, and refuses those whose `n` is null. `answers` come before."""

    def __init__(self):
        self.rows = []
        self.requests = []
        self.answers = []
        self.service = HttpService(self._answer)

    def _answer(self, method, path, headers, body):
        rows = json.loads(body)
        self.requests.append((method, path, headers["Content-Type"], len(rows)))
        status = self.answers.pop(0) if self.answers else 200
        if any(row["n"] is None for row in rows):
            status = 422
        if status == 200:
            self.rows += rows
        return status, {}, b""


@pytest.fixture
def api():
    made = Api()
    yield made
    made.service.close()


def opened(api):
    context = OutputContext(
        name="output",
        options=HttpOptions(f"{api.service.url}/rows"),
        application="a",
        stream="s",
        shard_id="shardId-0",
        key="k",
        fencing_token=1,
    )
    output = open_user_output(HttpRows, "http_rows:HttpRows", context)
    output.begin(AT)
    return output


def add(output, *rows):
    output.add([output.encode(row)[0] for row in rows], AT)


@pytest.mark.seconds
def test_it_keeps_every_promise_of_an_output_that_has_each_row_at_least_once(api):
    assert_output_contract(
        HttpRows,
        options={"url": f"{api.service.url}/rows"},
        rows=[{"n": number} for number in range(6)],
        read=lambda: api.rows,
        fresh=api.rows.clear,
        refused={"n": None},
    )


def test_rows_leave_in_requests_of_two_hundred_and_their_order(api):
    output = opened(api)
    add(output, *({"n": number} for number in range(450)))
    assert output.unsent_bytes == 0
    assert output.commit() == AT
    assert [row["n"] for row in api.rows] == list(range(450))
    assert api.requests[0] == ("POST", "/rows", "application/json", 200)
    assert [count for *_, count in api.requests] == [200, 200, 50]


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_rows_wait_while_the_api_is_away_and_only_those_it_has_not_taken_are_sent_again(
    api, status
):
    output = opened(api)
    api.answers = [200, status, status]
    add(output, *({"n": number} for number in range(300)))
    assert output.unsent_bytes > 0
    with pytest.raises(SinkError, match=rf"HttpRows.send raised OSError: .*/rows answers {status}"):
        output.commit()
    output.commit()
    assert [row["n"] for row in api.rows] == list(range(300))


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_an_answer_that_a_person_has_to_correct_halts_the_lease(api, status):
    output = opened(api)
    api.answers = [status, status]
    add(output, {"n": 1})
    with pytest.raises(SettingsError, match=f"answers {status}"):
        output.commit()


def test_a_row_that_the_api_refuses_names_no_value(api):
    output = opened(api)
    add(output, {"n": None, "secret": "value"})
    with pytest.raises(SettingsError, match="answers 422") as refused:
        output.commit()
    assert "value" not in str(refused.value)


def test_a_check_says_what_the_api_answers(api):
    assert opened(api).check().endswith("/rows answers 501")
    api.service.close()
    with pytest.raises(SinkError, match=r"HttpRows\.check raised"):
        opened(api).check()
