"""The actions on the page: release, move, pause and resume, each with its plan before it is done.

`leases/operating.py` plans, as for the command line. Rules: nothing is changed by a GET; a POST
needs the token in the form, so that no cookie or other standing permission can be abused; and it
does only what the plan on the page said, else it shows the new plan.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from kclrun.leases.operating import (
    Plan,
    Reach,
    plan_move,
    plan_pause,
    plan_resume,
    plan_unpause,
)
from kclrun.model.lease import Lease, LeaseKey, Owner, OwnerId, Scope
from kclrun.model.stream import called
from kclrun.model.time import WallTime
from kclrun.observe.endpoint import Query
from kclrun.page.layout import shard_link
from kclrun.page.markup import Html, element, joined, link
from kclrun.page.snapshot import About, Snapshot
from kclrun.protocol.writes import Applied, ConditionFailed, Outcome

PATH: Final = "/act"
# The pauses on offer, in seconds. Any other one: `kclrun pause --for`.
_PAUSES: Final[Mapping[str, float | None]] = {
    "30m": 1_800.0,
    "2h": 7_200.0,
    "12h": 43_200.0,
    "until resumed": None,
}
_PLANS_SHOWN_MAX: Final = 50


class Do(enum.Enum):
    """The actions."""

    RELEASE = "release"
    MOVE = "move"
    PAUSE = "pause"
    UNPAUSE = "end the pause"
    RESUME = "resume"


class Wish(msgspec.Struct, frozen=True):
    """An action that a form names. `key` empty: all leases (pauses only)."""

    do: Do
    key: str = ""
    to: str = ""
    lasting: str = "until resumed"

    @property
    def reach(self) -> Reach:
        if self.key:
            return Reach(Scope.SHARD, frozenset({LeaseKey(self.key)}))
        return Reach(Scope.ALL)

    @property
    def title(self) -> str:
        return f"{self.do.value.capitalize()}: {called(self.key) if self.key else 'all shards'}"


class Actions:
    """What the page needs for actions. `read` returns the rows of the table as they are now, those
    of one key or all; `write` sends the changes of plans; `now` is the service's time. The token is
    compared in constant time, and shown nowhere."""

    def __init__(
        self,
        token: str,
        *,
        read: Callable[[LeaseKey | None], Sequence[Lease]],
        write: Callable[[Sequence[Plan]], Mapping[LeaseKey, Outcome]],
        now: Callable[[], WallTime],
    ) -> None:
        self._digest = hashlib.sha256(token.encode()).digest()
        self.read = read
        self.write = write
        self.now = now

    def permits(self, token: str) -> bool:
        """Whether it is the token. Digests are of one length, so nothing of it is learned."""
        return hmac.compare_digest(hashlib.sha256(token.encode()).digest(), self._digest)


def wish_of(fields: Query) -> Wish | None:
    """The action that a query or a form names; None if it names none that there is."""
    do = next((each for each in Do if each.value == fields.get("do")), None)
    lasting = fields.get("lasting", "until resumed")
    if do is None or lasting not in _PAUSES:
        return None
    key = fields.get("key", "")
    if not key and do not in {Do.PAUSE, Do.UNPAUSE}:
        return None
    return Wish(do, key, fields.get("to", ""), lasting)


def plans_of(wish: Wish, leases: Sequence[Lease], now: WallTime) -> tuple[Plan, ...]:
    """The plans for these leases, of which the wish names some."""
    if wish.do is Do.PAUSE:
        return plan_pause(leases, wish.reach, now, _PAUSES[wish.lasting])
    if wish.do is Do.UNPAUSE:
        return plan_unpause(leases, wish.reach, now)
    lease = next((each for each in leases if each.key == wish.key), None)
    if lease is None:
        return ()
    if wish.do is Do.RESUME:
        return (plan_resume(lease),)
    if wish.do is Do.MOVE and Owner.parse(wish.to) is None:
        return (Plan(lease.key, f"{lease.key}: no owner was chosen"),)
    return (plan_move(lease, OwnerId(wish.to) if wish.do is Do.MOVE else None, now),)


def basis_of(plans: Sequence[Plan]) -> str:
    """A digest of what these plans rest on, for the form."""
    text = "\n".join(each.basis for each in plans)
    return hashlib.sha256(text.encode()).hexdigest()


def shard_actions(lease: Lease, owners: Sequence[OwnerId]) -> Html:
    """The actions for one shard, on its page; each leads to its plan."""
    if lease.is_ended:
        return joined()
    hold = _asking(Do.PAUSE, lease.key, _choice("lasting", "how long", tuple(_PAUSES)))
    if lease.pause is not None:
        hold = _asking(Do.UNPAUSE, lease.key)
    others = [each for each in owners if each != lease.owner]
    return joined(
        element("h2", "Actions"),
        element(
            "div",
            _asking(Do.RESUME, lease.key) if lease.halt is not None else None,
            hold,
            _asking(Do.RELEASE, lease.key),
            _asking(Do.MOVE, lease.key, _choice("to", "to", others)) if others else None,
            class_="actions",
        ),
    )


def fleet_actions(snapshot: Snapshot) -> Html:
    """The actions for the whole fleet."""
    is_paused = any(lease.pause is not None for lease in snapshot.leases.values())
    return joined(
        element("h2", "Actions"),
        element(
            "div",
            _asking(
                Do.PAUSE, "", _choice("lasting", "how long", tuple(_PAUSES)), "pause all shards"
            ),
            _asking(Do.UNPAUSE, "", None, "end all pauses") if is_paused else None,
            class_="actions",
        ),
    )


def _asking(do: Do, key: str, more: Html | None = None, name: str = "") -> Html:
    """A form that leads to the plan; it changes nothing."""
    return element(
        "form",
        _hidden("do", do.value),
        _hidden("key", key) if key else None,
        more,
        element("button", f"{name or do.value} …", type="submit"),
        method="get",
        action=PATH,
    )


def _choice(name: str, label: str, values: Sequence[str]) -> Html:
    options = [element("option", each, value=each) for each in values]
    return element("label", f"{label} ", element("select", options, name=name))


def _hidden(name: str, value: str) -> Html:
    return element("input", type="hidden", name=name, value=value)


def plan_body(wish: Wish, plans: Sequence[Plan], *, notice: str = "") -> Html:
    """The plan, and the form that does it, if anything can be done."""
    is_possible = any(each.change is not None for each in plans)
    return joined(
        element("div", element("p", notice), class_="box bad", role="alert") if notice else None,
        element("h2", "The plan"),
        [element("p", each.words, class_="words") for each in plans[:_PLANS_SHOWN_MAX]]
        or element("p", "There is no such lease."),
        element("p", f"… and {len(plans) - _PLANS_SHOWN_MAX} more leases.")
        if len(plans) > _PLANS_SHOWN_MAX
        else None,
        _doing(wish, plans) if is_possible else element("p", "Nothing can be done."),
        _back(wish),
    )


def _doing(wish: Wish, plans: Sequence[Plan]) -> Html:
    return element(
        "form",
        _hidden("do", wish.do.value),
        _hidden("key", wish.key) if wish.key else None,
        _hidden("to", wish.to) if wish.to else None,
        _hidden("lasting", wish.lasting),
        _hidden("basis", basis_of(plans)),
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
        element("button", f"Do it: {wish.do.value}", type="submit"),
        method="post",
        action=PATH,
        class_="actions",
    )


def _back(wish: Wish) -> Html:
    target = shard_link(wish.key) if wish.key else link("/", "the fleet")
    return element("p", "Back to ", target, ".")


def act(actions: Actions, wish: Wish, fields: Query) -> tuple[int, Html]:
    """Do what the form says, if its token is right and its plan still holds; the status, and the
    body of the answer."""
    if not actions.permits(fields.get("token", "")):
        return 403, element("p", "The token is wrong. Nothing was changed.", class_="box bad")
    leases = actions.read(LeaseKey(wish.key) if wish.key else None)
    plans = plans_of(wish, leases, actions.now())
    if not hmac.compare_digest(basis_of(plans), fields.get("basis", "")):
        notice = "The lease has changed since that plan was shown. Nothing was changed by you."
        return 409, plan_body(wish, plans, notice=notice)
    outcomes = actions.write([each for each in plans if each.change is not None])
    return 200, joined(
        element("h2", "Done"),
        [
            element("p", f"{called(key)}: {_result(outcome)}", class_="words")
            for key, outcome in outcomes.items()
        ],
        element("p", "Owners see it with their next renewal, within seconds."),
        _back(wish),
    )


def _result(outcome: Outcome) -> str:
    if isinstance(outcome, Applied):
        return "written"
    if isinstance(outcome, ConditionFailed):
        return "it changed in the same moment, and was left alone"
    return f"not written: {outcome.message}"


def about_letters(about: About, lease: Lease) -> Html:
    """What the command line does and the page does not."""
    if not about.letters:
        return joined()
    command = f"{about.letters_command} redrive"
    return element(
        "p", f"Dead letters of {called(lease.key)} go back with: ", element("code", command)
    )
