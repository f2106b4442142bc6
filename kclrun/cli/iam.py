"""`kclrun iam`: the IAM policy that an application needs, by its settings. Asks nobody.

What is allowed is decided in `aws/policies.py`; here, only whose policy is wanted, and where the
resources are: the region as for `run`, the account from the settings' ARNs or from `--account`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kclrun.cli import exit_codes
from kclrun.cli.config_options import config_options, load_configuration
from kclrun.config.rules import EMBEDDED
from kclrun.errors import SettingsError

if TYPE_CHECKING:
    from kclrun.aws.policies import Policy, Site
    from kclrun.config.schema import Settings

__all__ = ["iam"]

_RUN: Final = "run"
_PROVISION: Final = "provision"
_PUT: Final = "put"
_CALLER: Final = "caller"


@click.command()
@config_options
@click.option(
    "--for",
    "purpose",
    type=click.Choice([_RUN, _PROVISION, _PUT, _CALLER]),
    default=_RUN,
    show_default=True,
    help="run: a machine; provision: who makes or changes the lease table; put: `kclrun put`;"
    " caller: who assumes aws.role_arn.",
)
@click.option("--account", metavar="NUMBER", help="The account, where no ARN of the file says it.")
def iam(config: Path, overrides: tuple[str, ...], purpose: str, account: str | None) -> int:
    """Print the IAM policy that the application needs: what it calls, on what it names.

    \b
    kclrun iam --config app.yaml --account 123456789012 > policy.json
    aws iam put-role-policy --role-name orders --policy-name kclrun \\
        --policy-document file://policy.json
    """
    from kclrun.aws.policies import caller_policy

    settings = load_configuration(config, overrides).settings
    if settings.aws.endpoint == EMBEDDED:
        raise SettingsError("aws.endpoint: embedded asks nobody for permission; leave it out")
    role_arn = settings.aws.role_arn
    if purpose != _CALLER:
        policy = _policy(purpose, settings, _site(settings, account))
    elif role_arn is None:
        raise SettingsError("--for caller is for a role that is assumed: aws.role_arn names none")
    else:
        policy = caller_policy(role_arn)
    click.echo(json.dumps(policy, indent=2))
    return exit_codes.DRAINED


def _policy(purpose: str, settings: Settings, site: Site) -> Policy:
    from kclrun.aws.policies import provision_policy, put_policy, run_policy

    if purpose == _PUT:
        return put_policy(settings, site)
    if purpose == _RUN:
        return run_policy(settings, site, sink_stream=_sink_stream(settings))
    if settings.engine == "spark":
        raise SettingsError("engine: spark keeps no leases, and so has no lease table to make")
    return provision_policy(settings, site)


def _sink_stream(settings: Settings) -> str | None:
    """The stream that the pipeline's rows are put into, if they are."""
    output = settings.output
    if settings.engine != "spark" or output is None or output.format != "kclrun":
        return None
    from kclrun.spark.sink.options import sink_settings

    return sink_settings(
        {name: str(value) for name, value in output.options.items()}
    ).reached.stream


def _site(settings: Settings, account: str | None) -> Site:
    from kclrun.aws.endpoints import EndpointSettings, open_session
    from kclrun.aws.policies import Site

    session = open_session(
        EndpointSettings(region=settings.aws.region, profile=settings.aws.profile)
    )
    region = session.get_config_variable("region")
    if region is None:
        raise SettingsError("no AWS region: set aws.region, AWS_REGION, or a region in the profile")
    return Site(
        partition=session.get_partition_for_region(region),
        region=region,
        account=_account(settings, account),
    )


def _account(settings: Settings, given: str | None) -> str:
    """Of the lease table: as told, else the role's that is assumed, else the stream's."""
    found = given or next(_accounts_named(settings), None)
    if found is None:
        raise SettingsError(
            "the account is not known: no ARN of the file says it\n"
            "Add --account NUMBER; `aws sts get-caller-identity` shows it"
        )
    if not (found.isascii() and found.isdigit() and len(found) == 12):
        raise SettingsError(f"--account: expected 12 digits, got {found!r}")
    return found


def _accounts_named(settings: Settings) -> Iterator[str]:
    named = [settings.aws.role_arn, *(source.name for source in settings.sources)]
    for arn in named:
        if arn is not None and arn.startswith("arn:"):
            yield arn.split(":")[4]
