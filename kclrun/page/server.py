"""The server of the pages: the view of each path, its actions, and the rules for browsers."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from kclrun.model.stream import display_name, is_loopback_host
from kclrun.observe.endpoint import Answer, Feed, HttpEndpoint, Query, Route
from kclrun.page.acting import PATH, Actions, act, action_plan, fleet_actions, plan_body, request_of
from kclrun.page.detail_view import Details, letters_body
from kclrun.page.fleet_view import fleet_body, settings_body
from kclrun.page.layout import page
from kclrun.page.markup import Html, element, joined, short
from kclrun.page.outputs_view import Warned, leases_to_ask, outputs_body
from kclrun.page.shards_view import lineage_body, shard_body, shards_body
from kclrun.page.snapshot import About, Snapshot

_HTML: Final = "text/html; charset=utf-8"
# Only our own script runs, nothing is loaded from elsewhere, and no other page shows or reads ours.
_FIELDS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


# With actions: forms go to this page alone. A browser hides the origin of a form where no referrer
# may be sent, and without its origin a form is refused.
_FIELDS_OF_ACTIONS: Final = _FIELDS | {
    "Content-Security-Policy": _FIELDS["Content-Security-Policy"].replace(
        "form-action 'none'", "form-action 'self'"
    ),
    "Referrer-Policy": "same-origin",
}


def serve_pages(
    host: str,
    port: int,
    about: About,
    look: Callable[[], Snapshot],
    actions: Actions | None = None,
    *,
    details: Details | None = None,
    setting: str = "--listen, --port",
) -> HttpEndpoint:
    """Serve the pages of the snapshots that `look` returns, until `close`; with `details`, the
    story and the live detail of a shard, and with `actions`, changes of leases, too. `setting`
    chose the address, and is named in the error.

    Raises: SettingsError if the address is not usable.
    """
    return HttpEndpoint(
        host,
        port,
        routes(about, look, actions=actions, details=details),
        forms=forms(about, look, actions) if actions is not None else {},
        feeds={"/live": Feed(lambda: version_of(look()))},
        fields=_FIELDS if actions is None else _FIELDS_OF_ACTIONS,
        is_our_name=is_loopback_host if is_loopback_host(host) else is_address,
        setting=setting,
    )


def version_of(snapshot: Snapshot) -> object:
    """Another value when something was read, or a reading failed."""
    problems = tuple((problem.about, problem.message) for problem in snapshot.problems)
    return snapshot.table_at, snapshot.lags_at, snapshot.findings_at, problems


def is_address(host: str) -> bool:
    """Whether a requested host is an address, or this host. A page of another site that points a
    name of its own at this server has to send that name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return is_loopback_host(host)
    return True


def forms(about: About, look: Callable[[], Snapshot], actions: Actions) -> dict[str, Route]:
    """The paths that take a form, each with the function that does it and makes its answer."""

    def done(fields: Query) -> Answer:
        request = request_of(fields)
        if request is None:
            return Answer(b"no such action\n", status=400)
        status, body = act(actions, request, fields)
        answer = page(about, look(), PATH, {}, title=request.title, body=body, is_still=True)
        return Answer(answer, _HTML, status)

    return {PATH: done}


def _lineage(details: Details | None, snapshot: Snapshot, _: Query) -> Html:
    return lineage_body(snapshot, details.ended() if details is not None else frozenset())


def _warned(about: About, snapshot: Snapshot, details: Details | None) -> Mapping[str, Warned]:
    """The last warning of each lease: as its owner has it, for those that an output may hold up;
    of the others, as the stories have it."""
    if details is None:
        return {}
    warned = dict(details.warned())
    for lease in leases_to_ask(about, snapshot):
        asked = details.asked(lease)
        errors = asked.detail.errors if asked is not None and asked.detail is not None else ()
        for error in errors[::-1]:  # the last one first
            if error.event == "lease_process_warned":
                warned[lease.key] = Warned(error.at, error.error)
    return warned


def routes(
    about: About,
    look: Callable[[], Snapshot],
    *,
    actions: Actions | None = None,
    details: Details | None = None,
) -> dict[str, Route]:
    """The paths, each with the function that makes its answer of a query."""

    def titled(path: str, title: str, body: Callable[[Snapshot, Query], Html]) -> Route:
        def answer(query: Query) -> Answer:
            snapshot = look()
            return Answer(
                page(about, snapshot, path, query, title=title, body=body(snapshot, query)), _HTML
            )

        return answer

    def one_shard(query: Query) -> Answer:
        snapshot, key = look(), query.get("key", "")
        body = shard_body(about, snapshot, key, details=details)
        status, title = 200, short(display_name(key), 80)
        if body is None:
            status, title = 404, "No such shard"
            body = element("p", f"Neither the table nor the stream has a shard {short(key)}.")
        return Answer(page(about, snapshot, "/shard", query, title=title, body=body), _HTML, status)

    def plan(query: Query) -> Answer:
        request, snapshot = request_of(query), look()
        if request is None or actions is None:
            return Answer(b"no such action\n", status=400)
        body = plan_body(request, action_plan(actions, request, snapshot))
        answer = page(about, snapshot, PATH, {}, title=request.title, body=body, is_still=True)
        return Answer(answer, _HTML)

    def fleet(snapshot: Snapshot, _: Query) -> Html:
        acting = fleet_actions(snapshot) if actions is not None else None
        return joined(fleet_body(about, snapshot), acting)

    def outputs(snapshot: Snapshot, _: Query) -> Html:
        letters = details.letters() if details is not None else None
        warned = _warned(about, snapshot, details)
        return joined(outputs_body(about, snapshot, warned), letters_body(about, letters))

    here = Path(__file__)
    style = Answer(here.with_name("style.css").read_bytes(), "text/css; charset=utf-8")
    script = Answer(here.with_name("live.js").read_bytes(), "text/javascript; charset=utf-8")
    return {
        **({PATH: plan} if actions is not None else {}),
        "/": titled("/", "Fleet", fleet),
        "/shards": titled(
            "/shards", "Shards", lambda snapshot, query: shards_body(about, snapshot, query)
        ),
        "/shard": one_shard,
        "/lineage": titled("/lineage", "Lineage", partial(_lineage, details)),
        "/outputs": titled("/outputs", "Outputs and dead letters", outputs),
        "/settings": titled("/settings", "Settings", lambda _, __: settings_body(about)),
        "/style.css": lambda _: style,
        "/live.js": lambda _: script,
    }
