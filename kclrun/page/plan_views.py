"""The pages of outputs and dead letters, and of the settings. Pure."""

from __future__ import annotations

from typing import Final

from kclrun.page.layout import facts, shard_link, table
from kclrun.page.markup import Html, element, joined, short
from kclrun.page.snapshot import About, Snapshot

_ROWS_MAX: Final = 1_000


def outputs_body(about: About, snapshot: Snapshot) -> Html:
    """The cursors on the rows, and the place of the dead letters."""
    with_cursors = [lease for lease in snapshot.leases.values() if lease.outputs is not None]
    rows = [
        element(
            "tr",
            element("th", shard_link(lease.key), scope="row", class_="id"),
            element("td", short(name)),
            element("td", short(str(cursor)), class_="id"),
            element("td", short(str(lease.checkpoint)), class_="id"),
        )
        for lease in sorted(with_cursors, key=lambda lease: lease.key)
        if lease.outputs is not None
        for name, cursor in lease.outputs.cursors
    ]
    more = f" The first {_ROWS_MAX} are shown." if len(rows) > _ROWS_MAX else ""
    caption = f"{len(rows)} cursors: how far each output has the rows of each shard.{more}"
    heads = ("shard", "output", "cursor", "checkpoint")
    return joined(
        element("h2", "Outputs"),
        table(caption, heads, rows[:_ROWS_MAX], label="Outputs")
        if rows
        else element("p", "No row of the lease table has the cursor of an output."),
        element("h2", "Dead letters"),
        element("p", about.letters or "The application keeps no dead letters."),
        element(
            "p",
            "They are not counted here: a queue has to be received and a bucket to be listed for"
            " that. To see them: ",
            element("code", about.letters_command),
        )
        if about.letters
        else None,
    )


def settings_body(about: About) -> Html:
    """The settings as resolved on this machine, without secrets."""
    return joined(
        element(
            "p",
            "As this machine resolves the configuration; the fleet's machines may have another."
            " Values of options, addresses of databases and the environment are never shown.",
            class_="quiet",
        ),
        [joined(element("h2", name), facts(pairs)) for name, pairs in about.plan],
    )
