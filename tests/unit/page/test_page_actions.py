"""The actions of the page over real sockets: plan, token, origin; and what an attacker gets."""

import re
from urllib.parse import quote, urlencode

import msgspec
import pytest

from kclrun.errors import InvalidRequest, NotFound, Unavailable
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import ANYBODY, Halt, LeaseKey, Pause, Scope
from kclrun.model.sequence import SHARD_END
from kclrun.model.stream import StreamKey, qualified
from kclrun.operating.changes import plan_move
from kclrun.page.acting import Actions, PlanText
from kclrun.page.server import serve_pages
from kclrun.protocol.writes import CreateLease, Renew
from tests.unit.page.fleet import ABOUT, JAVA, NOW, A, B, key, lease, snapshot_of
from tests.unit.page.test_page_server import ask

TOKEN = "not-a-secret-of-anyone"
HALT = Halt("ValueError: bad row", NOW)


class Site:
    """A table in memory, and the page of it with actions."""

    def __init__(self, *leases, letters=None, snapshot=None):
        self.rows, self.written = LeaseRows(), 0
        self._snapshot = snapshot or snapshot_of()
        for each in leases:
            self.rows.write(CreateLease(each))
        about = msgspec.structs.replace(ABOUT, has_actions=True)
        self.actions = actions = Actions(
            TOKEN, read=self._read, write=self._write, now=lambda: NOW, letters=letters
        )
        self.server = serve_pages("127.0.0.1", 0, about, self.look, actions)

    def look(self):
        leases = {each.key: each for page in self.rows.scan() for each in page.leases}
        return msgspec.structs.replace(self._snapshot, leases=leases)

    def _read(self, key):
        return tuple(e for page in self.rows.scan() for e in page.leases if key in {None, e.key})

    def _write(self, plans):
        self.written += 1
        return {each.key: self.rows.write(each.change) for each in plans}

    def plan(self, **fields):
        status, _, page = ask(self.server, f"/act?{urlencode(fields)}")
        return status, page

    def fields(self, page):
        """The fields that the page's form sends, by their names."""
        (form,) = re.findall(r'<form method="post".*?</form>', page)
        return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form))

    def post(self, fields, origin=None, **headers):
        named = {
            "Content-Type": "application/x-www-form-urlencoded",
            "Origin": self.server.url if origin is None else origin,
        } | headers
        named = {name: value for name, value in named.items() if value}
        return ask(self.server, "/act", "POST", body=urlencode(fields), **named)

    def done(self, **wish):
        """The plan is shown, and its form sent with the token."""
        status, page = self.plan(**wish)
        assert status == 200
        assert self.written == 0, "a plan changed something"
        return self.post(self.fields(page) | {"token": TOKEN})


@pytest.fixture
def made():
    sites = []

    def make(*leases, **more):
        sites.append(Site(*leases, **more))
        return sites[-1]

    yield make
    for site in sites:
        site.server.close()


@pytest.mark.parametrize(
    ("row", "wish", "changed"),
    [
        (lease(0), {"do": "pause"}, {"pause": Pause(NOW)}),
        (lease(0), {"do": "pause", "lasting": "30m"}, {"pause": Pause(NOW, NOW + 1_800)}),
        (lease(0, pause=Pause(NOW)), {"do": "end the pause"}, {"pause": None}),
        (lease(0, halt=HALT), {"do": "resume"}, {"halt": None}),
    ],
)
def test_each_action_shows_its_plan_and_is_done_with_the_token(made, row, wish, changed):
    site = made(row, lease(1, B))

    status, _, page = site.done(key=key(0), **wish)

    assert (status, "written" in page) == (200, True)
    after = site.rows.read(key(0))
    assert {name: getattr(after, name) for name in changed} == changed
    assert site.rows.read(key(1)) == lease(1, B)


@pytest.mark.parametrize(
    ("wish", "to"), [({"do": "release"}, ANYBODY), ({"do": "move", "to": B}, B)]
)
def test_the_plan_is_that_of_the_command_line(made, wish, to):
    site = made(lease(0), lease(1, B))

    _, page = site.plan(key=key(0), **wish)
    site.done(key=key(0), **wish)

    for line in plan_move(lease(0), None if to == ANYBODY else B, NOW).words.split("\n"):
        assert line in page
    assert site.rows.read(key(0)).handoff.to == to


def test_all_shards_are_paused_and_resumed_at_once(made):
    site = made(lease(0), lease(1, B), lease(2, JAVA), lease(3, checkpoint=SHARD_END))

    _, page = site.plan(do="pause")
    site.done(do="pause")

    assert "READS ON" in page
    pauses = [site.rows.read(key(number)).pause for number in range(4)]
    assert pauses == [Pause(NOW, scope=Scope.ALL)] * 3 + [None]
    site.written = 0
    site.done(do="end the pause")
    assert {site.rows.read(key(number)).pause for number in range(4)} == {None}


def test_a_plan_that_holds_no_more_is_shown_again_and_not_done(made):
    site = made(lease(0))
    fields = site.fields(site.plan(do="release", key=key(0))[1])
    site.rows.write(Renew(key(0), A, 7))
    assert site.post(fields | {"token": TOKEN})[0] == 200, "a renewal is no other plan"
    site = made(lease(0, pause=Pause(NOW)))
    fields = site.fields(site.plan(do="end the pause", key=key(0))[1])
    site.rows._put(key(0), lease(0, pause=Pause(NOW + 9)))

    status, _, page = site.post(fields | {"token": TOKEN})

    assert (status, site.written) == (409, 0)
    assert "has changed since that plan was shown" in page
    assert site.rows.read(key(0)).pause == Pause(NOW + 9)
    assert site.post(site.fields(page) | {"token": TOKEN})[0] == 200


def test_a_form_with_the_basis_of_no_plan_changes_nothing(made):
    site = made(lease(0))
    fields = site.fields(site.plan(do="release", key=key(0))[1])

    for basis in ("", "é"):
        status, _, page = site.post(fields | {"token": TOKEN, "basis": basis})

        assert (status, site.written) == (409, 0)
        assert "has changed since that plan was shown" in page


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", TOKEN[:-1], "é" * 20])
def test_without_its_token_nothing_is_read_or_done(made, token):
    site = made(lease(0))
    fields = site.fields(site.plan(do="pause", key=key(0))[1])

    status, _, page = site.post(fields | {"token": token})

    assert (status, site.written) == (403, 0)
    assert "The token is wrong" in page
    assert TOKEN not in page
    assert site.rows.read(key(0)).pause is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json"}, 415),
        ({"Content-Length": "9999999"}, 411),
        ({"Content-Length": "5000"}, 413),
    ],
)
def test_a_form_of_another_site_is_refused_even_with_the_token(made, headers, status):
    site = made(lease(0))
    fields = site.fields(site.plan(do="pause", key=key(0))[1])

    answer = site.post(fields | {"token": TOKEN}, **headers)

    assert (answer[0], site.written) == (status, 0)


def test_nothing_is_done_by_a_get_and_nothing_without_actions(made):
    site = made(lease(0))
    fields = site.fields(site.plan(do="pause", key=key(0))[1]) | {"token": TOKEN}

    assert ask(site.server, f"/act?{urlencode(fields)}")[0] == 200
    assert ask(site.server, "/", "POST", body=urlencode(fields), Origin=site.server.url)[0] == 405
    assert site.written == 0
    reading = serve_pages("127.0.0.1", 0, ABOUT, site.look)
    try:
        assert ask(reading, "/act?do=pause")[0] == 404
        assert ask(reading, "/act", "POST", Origin=reading.url)[0] == 405
        assert "<form" not in ask(reading, f"/shard?key={key(0)}")[2]
        assert "form-action 'none'" in ask(reading, "/")[1]["Content-Security-Policy"]
    finally:
        reading.close()


@pytest.mark.parametrize(
    "wish",
    [
        {"do": "delete", "key": key(0)},
        {"do": "redrive", "to": "elsewhere"},
        {"do": "pause", "lasting": "1y"},
        {},
    ],
)
def test_an_action_that_there_is_not_is_refused(made, wish):
    site = made(lease(0))

    assert site.plan(**wish)[0] == 400
    assert site.post(wish | {"token": TOKEN})[0] == 400


def test_an_action_that_is_not_possible_has_no_form(made):
    site = made(lease(0, JAVA), lease(1))

    for wish in (
        {"do": "release", "key": key(0)},
        {"do": "move", "key": key(1), "to": "<script>"},
        {"do": "resume", "key": key(1)},
        {"do": "end the pause", "key": key(1)},
        {"do": "pause", "key": "no such"},
    ):
        status, page = site.plan(**wish)
        assert (status, "Nothing can be done." in page) == (200, True), wish
        assert "<script" not in page


STREAMS = [StreamKey(f"123456789012:{name}:1700000000") for name in ("orders", "views")]


def of_stream(number, stream, **fields):
    return msgspec.structs.replace(
        lease(number, **fields), key=LeaseKey(qualified(stream, key(number)))
    )


@pytest.mark.parametrize(
    ("wish", "changed"),
    [
        ({"do": "pause", "lasting": "2h"}, lambda row: row.pause is not None),
        ({"do": "resume"}, lambda row: row.halt is None),
        ({"do": "release"}, lambda row: row.handoff is not None and row.handoff.to == ANYBODY),
        ({"do": "move", "to": B}, lambda row: row.handoff is not None and row.handoff.to == B),
    ],
)
def test_an_action_of_a_stream_changes_its_leases_and_no_other(made, wish, changed):
    rows = [of_stream(n, stream, halt=HALT) for stream in STREAMS for n in range(2)]
    ended = of_stream(7, STREAMS[0], checkpoint=SHARD_END)
    site = made(*rows, ended)
    assert "orders" in ask(site.server, "/")[2]

    status, _, page = site.done(stream=STREAMS[0], **wish)

    assert (status, page.count("written")) == (200, 2)
    after = {row.key: site.rows.read(row.key) for row in (*rows, ended)}
    assert [key for key, row in after.items() if changed(row) and not row.is_ended] == [
        row.key for row in rows[:2]
    ]
    assert after[ended.key] == ended
    assert {after[row.key] for row in rows[2:]} == set(rows[2:])


class Kept:
    """Letters, and which redrives were done."""

    def __init__(self):
        self.done, self.count = [], 3

    def plan(self, key, to):
        return PlanText((f"Would process {self.count} letters",), f"{self.count} {key} {to}", True)

    def redrive(self, key, to, basis):
        if basis != self.plan(key, to).basis:
            return None
        self.done.append((key, to))
        return (f"Processed {self.count}",)


def test_dead_letters_are_redriven_by_their_plan_and_the_token_alone(made):
    letters = Kept()
    site = made(lease(0), letters=letters)

    _, page = site.plan(do="redrive", key=key(0), to="processor")
    fields = site.fields(page) | {"token": TOKEN}
    assert "Would process 3 letters" in page
    assert site.post(fields | {"token": "another token of some length"})[0] == 403
    letters.count = 4
    status, _, page = site.post(fields)
    assert (status, "Would process 4 letters" in page) == (409, True)
    assert letters.done == []
    status, _, page = site.post(site.fields(page) | {"token": TOKEN})
    assert (status, "Processed 4" in page) == (200, True)
    assert letters.done == [(key(0), "processor")]
    assert site.plan(do="redrive", to="/etc")[0] == 400

    _, page = made(lease(0)).plan(do="redrive", key=key(0), to="stream")
    assert "does not redrive the dead letters of a queue" in page
    assert '<form method="post"' not in page


def test_a_title_keeps_the_capitals_of_a_stream_and_of_a_time(made):
    streams = [StreamKey(f"123456789012:{name}:1700000000") for name in ("Orders-EU", "views")]
    row = of_stream(0, streams[0], pause=Pause(NOW))
    site = made(row, of_stream(1, streams[1]))

    assert "<h3>Stream Orders-EU</h3>" in ask(site.server, "/")[2]
    page = ask(site.server, f"/shard?key={quote(row.key)}")[2]
    assert re.search(r"<strong>Paused since [0-9-]+T[0-9:]+Z", page)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("GetItem: shop: a row without a counter", code="BrokenRow"), 409),
        (NotFound("there is no table shop"), 409),
        (Unavailable("GetItem: no answer"), 503),
    ],
)
def test_a_row_that_cannot_be_read_is_answered_in_words_and_nothing_is_changed(
    made, monkeypatch, error, status
):
    site = made(lease(0))
    _, page = site.plan(do="pause", key=key(0))
    fields = site.fields(page)

    def broken(_):
        raise error

    monkeypatch.setattr(site.actions, "read", broken)

    answered, _, words = site.post(fields | {"token": TOKEN})

    assert answered == status
    assert f"It cannot be read: {error}. Nothing was changed." in words
    assert site.written == 0
