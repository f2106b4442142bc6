"""The actions on the page: release, move, pause and resume a shard, a stream or the whole fleet,
and redrive dead letters. Each shows its plan first.

The plans come from `operating/changes.py` and from the code of `kclrun dead-letters`, as for the
command line. Rules: a GET changes nothing. A POST needs the token in its form; a cookie does not
count. A POST does what the plan on the page said, or shows the new plan.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from kclrun.errors import KclrunError
from kclrun.model.lease import Lease, LeaseKey, Owner, OwnerId, Scope
from kclrun.model.retries import PASSING
from kclrun.model.stream import StreamKey, display_name, stream_name_of, stream_of
from kclrun.model.time import WallTime
from kclrun.observe.endpoint import Query
from kclrun.operating.changes import (
    ChosenLeases,
    LeasePlan,
    plan_move,
    plan_pause,
    plan_resume,
    plan_unpause,
)
from kclrun.page.layout import shard_link
from kclrun.page.markup import Html, as_title, element, joined, link
from kclrun.page.snapshot import Snapshot
from kclrun.page.token import Token
from kclrun.protocol.writes import Applied, ConditionFailed, Outcome

PATH: Final = "/act"
# The pauses on offer, in seconds. Any other one: `kclrun pause --for`.
_PAUSES: Final[Mapping[str, float | None]] = {
    "30m": 1_800.0,
    "2h": 7_200.0,
    "12h": 43_200.0,
    "until resumed": None,
}
# An operator reads no more; the number of the others is shown.
_PLANS_SHOWN_MAX: Final = 50
_STREAMS_MAX: Final = 20
# The places to which dead letters are redriven.
_TO: Final = ("processor", "stream")
_CHANGED: Final = "It has changed since that plan was shown. Nothing was changed by you."
_NOT_HERE: Final = (
    "The page does not redrive the dead letters of a queue: for the plan it would have to receive"
    " them, and they would be hidden from others for ten minutes. `kclrun dead-letters redrive`"
    " redrives them."
)


class ActionKind(enum.Enum):
    """The actions."""

    RELEASE = "release"
    MOVE = "move"
    PAUSE = "pause"
    UNPAUSE = "end the pause"
    RESUME = "resume"
    REDRIVE = "redrive"


class ActionRequest(msgspec.Struct, frozen=True):
    """An action that a form names: for the lease `key`, for a stream, or for the fleet. `to` is an
    owner; for a redrive it is "processor" or "stream"."""

    kind: ActionKind
    key: str = ""
    to: str = ""
    lasting: str = "until resumed"
    stream: str = ""

    @property
    def reach(self) -> ChosenLeases:
        if self.key:
            return ChosenLeases(Scope.SHARD, frozenset({LeaseKey(self.key)}))
        if self.stream:
            return ChosenLeases(Scope.STREAM, stream=StreamKey(self.stream))
        return ChosenLeases(Scope.ALL)

    @property
    def title(self) -> str:
        whole = "all dead letters" if self.kind is ActionKind.REDRIVE else "all shards"
        if self.stream:
            whole = f"stream {stream_name_of(StreamKey(self.stream))}"
        return f"{as_title(self.kind.value)}: {display_name(self.key) if self.key else whole}"


class PlanText(msgspec.Struct, frozen=True):
    """A plan in words. `basis` is a digest of the rows, or the letters, that it was made from."""

    words: tuple[str, ...]
    basis: str = ""
    is_possible: bool = False


class Letters(Protocol):
    """Dead letters at a destination that can be read without a change there. Both methods return a
    failure as a sentence."""

    def plan(self, key: str, to: str) -> PlanText:
        """The plan to redrive the letters of the lease `key`, or all letters."""
        ...

    def redrive(self, key: str, to: str, basis: str) -> tuple[str, ...] | None:
        """Redrive. Returns: the letters that were redriven, in words; None if the plan has another
        `basis` by now."""
        ...


class Actions:
    """The calls behind the actions. `read` returns the rows of the table as they are now, those of
    one key or all; `write` sends the changes of plans; `now` is the service's time; `letters` are
    the dead letters, if they can be redriven here. `refused` is called with the number of wrong
    tokens so far."""

    def __init__(
        self,
        token: str,
        *,
        read: Callable[[LeaseKey | None], Sequence[Lease]],
        write: Callable[[Sequence[LeasePlan]], Mapping[LeaseKey, Outcome]],
        now: Callable[[], WallTime],
        letters: Letters | None = None,
        refused: Callable[[int], object] = lambda _count: None,
    ) -> None:
        self.letters = letters
        self.token = Token(token, refused)
        self.read = read
        self.write = write
        self.now = now


def request_of(fields: Query) -> ActionRequest | None:
    """The action that a query or a form names; None if the page has no such action."""
    kind = next((kind for kind in ActionKind if kind.value == fields.get("do")), None)
    lasting = fields.get("lasting", "until resumed")
    if kind is None or lasting not in _PAUSES:
        return None
    key, stream, to = (fields.get(name, "") for name in ("key", "stream", "to"))
    if kind is ActionKind.REDRIVE and (stream or to not in _TO):
        return None
    return ActionRequest(kind, key, to, lasting, "" if key else stream)


def plans_of(
    request: ActionRequest, leases: Sequence[Lease], now: WallTime
) -> tuple[LeasePlan, ...]:
    """The plans for those of these leases that the request names."""
    if request.kind is ActionKind.PAUSE:
        return plan_pause(leases, request.reach, now, _PAUSES[request.lasting])
    if request.kind is ActionKind.UNPAUSE:
        return plan_unpause(leases, request.reach, now)
    meant = sorted(filter(request.reach.covers, leases), key=lambda lease: lease.key)
    if not request.key:  # a plan for many leases leaves out those that have ended
        meant = [lease for lease in meant if not lease.is_ended]
    if request.kind is ActionKind.RESUME:
        return tuple(plan_resume(lease) for lease in meant if request.key or lease.halt is not None)
    if request.kind is ActionKind.MOVE and Owner.parse(request.to) is None:
        return tuple(
            LeasePlan(lease.key, f"{lease.key}: no owner was chosen") for lease in meant[:1]
        )
    target = OwnerId(request.to) if request.kind is ActionKind.MOVE else None
    return tuple(plan_move(lease, target, now) for lease in meant)


def plan_text(plans: Sequence[LeasePlan]) -> PlanText:
    """These plans as the page shows them."""
    words = [plan.words for plan in plans[:_PLANS_SHOWN_MAX]] or ["No lease fits this request."]
    if len(plans) > _PLANS_SHOWN_MAX:
        words.append(f"… and {len(plans) - _PLANS_SHOWN_MAX} more leases.")
    is_possible = any(plan.change is not None for plan in plans)
    return PlanText(tuple(words), basis_of(plans), is_possible)


def action_plan(actions: Actions, request: ActionRequest, snapshot: Snapshot) -> PlanText:
    """The plan of a request, from the rows that were read last."""
    if request.kind is not ActionKind.REDRIVE:
        return plan_text(plans_of(request, tuple(snapshot.leases.values()), snapshot.taken_at))
    if actions.letters is None:
        return PlanText((_NOT_HERE,))
    return actions.letters.plan(request.key, request.to)


def basis_of(plans: Sequence[LeasePlan]) -> str:
    """A digest of the rows that these plans were made from, for the form."""
    text = "\n".join(plan.basis for plan in plans)
    return hashlib.sha256(text.encode()).hexdigest()


def shard_actions(lease: Lease, owners: Sequence[OwnerId]) -> Html:
    """The actions for one shard, on its page; each leads to its plan."""
    if lease.is_ended:
        return joined()
    of_it = {"key": lease.key}
    hold = _asking(ActionKind.PAUSE, of_it, _choice("lasting", "how long", tuple(_PAUSES)))
    if lease.pause is not None:
        hold = _asking(ActionKind.UNPAUSE, of_it)
    others = [owner for owner in owners if owner != lease.owner]
    return joined(
        element("h2", "Actions"),
        element(
            "div",
            _asking(ActionKind.RESUME, of_it) if lease.halt is not None else None,
            hold,
            _asking(ActionKind.RELEASE, of_it),
            _asking(ActionKind.MOVE, of_it, _choice("to", "to", others)) if others else None,
            class_="actions",
        ),
    )


def fleet_actions(snapshot: Snapshot) -> Html:
    """The actions for all shards, and for each stream where there are several."""
    leases = snapshot.leases.values()
    of_streams: dict[str, list[Lease]] = {}
    for lease in leases:
        of_streams.setdefault(stream_of(lease.key), []).append(lease)
    streams = sorted(of_streams) if len(of_streams) > 1 else []
    owners = kclrun_owners(snapshot)
    return joined(
        element("h2", "Actions"),
        _of_many("all shards", {}, tuple(leases), owners),
        [
            _of_many(f"stream {stream_name_of(StreamKey(stream))}", {"stream": stream}, of, owners)
            for stream in streams[:_STREAMS_MAX]
            for of in (of_streams[stream],)
        ],
    )


def _of_many(
    name: str, meant: Mapping[str, str], leases: Sequence[Lease], owners: Sequence[OwnerId]
) -> Html:
    pauses = _choice("lasting", "how long", tuple(_PAUSES))
    is_paused = any(lease.pause is not None for lease in leases)
    is_halted = any(lease.halt is not None for lease in leases)
    return joined(
        element("h3", as_title(name)),
        element(
            "div",
            _asking(ActionKind.PAUSE, meant, pauses, f"pause {name}"),
            _asking(ActionKind.UNPAUSE, meant, None, f"end the pauses of {name}")
            if is_paused
            else None,
            _asking(ActionKind.RESUME, meant, None, f"resume the halted of {name}")
            if is_halted
            else None,
            _asking(ActionKind.RELEASE, meant, None, f"release {name}"),
            _asking(ActionKind.MOVE, meant, _choice("to", "to", owners), f"move {name}")
            if owners
            else None,
            class_="actions",
        ),
    )


def letter_actions(lease: Lease | None, *, what: str) -> Html:
    """The form that leads to the plan of a redrive, for one lease or for all letters."""
    meant = {"key": lease.key} if lease is not None else {}
    return element(
        "div",
        _asking(ActionKind.REDRIVE, meant, _choice("to", "to the", _TO), what),
        class_="actions",
    )


def kclrun_owners(snapshot: Snapshot) -> list[OwnerId]:
    """The owners of leases that have not ended, without the Java workers."""
    owners = {row.owner for row in snapshot.leases.values() if row.owner and not row.is_ended}
    return sorted(owner for owner in owners if Owner.parse(owner) is not None)


def _asking(
    kind: ActionKind, meant: Mapping[str, str], more: Html | None = None, name: str = ""
) -> Html:
    """A form that leads to the plan; it changes nothing."""
    return element(
        "form",
        _hidden("do", kind.value),
        [_hidden(field, value) for field, value in meant.items()],
        more,
        element("button", f"{name or kind.value} …", type="submit"),
        method="get",
        action=PATH,
    )


def _choice(name: str, label: str, values: Sequence[str]) -> Html:
    options = [element("option", value, value=value) for value in values]
    return element("label", f"{label} ", element("select", options, name=name))


def _hidden(name: str, value: str) -> Html:
    return element("input", type="hidden", name=name, value=value)


def plan_body(request: ActionRequest, plan: PlanText, *, notice: str = "") -> Html:
    """The plan, and the form that carries it out, if it changes anything."""
    return joined(
        element("div", element("p", notice), class_="box bad", role="alert") if notice else None,
        element("h2", "The plan"),
        [element("p", word, class_="words") for word in plan.words],
        _doing(request, plan) if plan.is_possible else element("p", "Nothing can be done."),
        _back(request),
    )


def _doing(request: ActionRequest, plan: PlanText) -> Html:
    return element(
        "form",
        _hidden("do", request.kind.value),
        [
            _hidden(name, value)
            for name, value in (
                ("key", request.key),
                ("to", request.to),
                ("stream", request.stream),
            )
            if value
        ],
        _hidden("lasting", request.lasting),
        _hidden("basis", plan.basis),
        element(
            "label",
            "Token ",
            element(
                "input",
                type="password",
                name="token",
                required="required",
                autocomplete="current-password",
            ),
        ),
        element("button", f"Do it: {request.kind.value}", type="submit"),
        method="post",
        action=PATH,
        class_="actions",
    )


def _back(request: ActionRequest) -> Html:
    target = shard_link(request.key) if request.key else link("/", "the fleet")
    return element("p", "Back to ", target, ".")


def act(actions: Actions, request: ActionRequest, fields: Query) -> tuple[int, Html]:
    """Do what the form says, if its token is right and its plan still holds. Returns: the status,
    and the body of the answer."""
    if not actions.token.check(fields.get("token", "")):
        return 403, element("p", "The token is wrong. Nothing was changed.", class_="box bad")
    if request.kind is ActionKind.REDRIVE:
        return _redrive(actions, request, fields)
    try:
        leases = actions.read(LeaseKey(request.key) if request.key else None)
    except KclrunError as error:
        words = f"It cannot be read: {error}. Nothing was changed."
        status = 503 if isinstance(error, PASSING) else 409
        return status, joined(element("p", words, class_="box bad"), _back(request))
    plans = plans_of(request, leases, actions.now())
    if basis_of(plans) != fields.get("basis"):
        return 409, plan_body(request, plan_text(plans), notice=_CHANGED)
    outcomes = actions.write([plan for plan in plans if plan.change is not None])
    return 200, joined(
        element("h2", "Done"),
        [
            element("p", f"{display_name(key)}: {_result(outcome)}", class_="words")
            for key, outcome in outcomes.items()
        ],
        element("p", "Owners see it with their next renewal, within seconds."),
        _back(request),
    )


def _redrive(actions: Actions, request: ActionRequest, fields: Query) -> tuple[int, Html]:
    letters = actions.letters
    if letters is None:
        return 409, plan_body(request, PlanText((_NOT_HERE,)))
    done = letters.redrive(request.key, request.to, fields.get("basis", ""))
    if done is None:
        return 409, plan_body(request, letters.plan(request.key, request.to), notice=_CHANGED)
    lines = [element("p", line, class_="words") for line in done]
    return 200, joined(element("h2", "Done"), lines, _back(request))


def _result(outcome: Outcome) -> str:
    if isinstance(outcome, Applied):
        return "written"
    if isinstance(outcome, ConditionFailed):
        return "it changed in the same moment, and was left alone"
    return f"not written: {outcome.message}"
