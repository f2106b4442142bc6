"""`kclrun iam`: prints the IAM policy that an application needs. It sends no request.

`aws/policies.py` decides the permissions. This module chooses the policy and the place of the
resources: the region as for `run`, the account from `--account` or from the settings' ARNs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice, ConfigCommand, RenamedOption, config_options
from kclrun.cli.reports import print_json
from kclrun.config.changes import refuse_changes
from kclrun.config.rules import EMBEDDED
from kclrun.config.schema import Settings
from kclrun.errors import SettingsError

if TYPE_CHECKING:
    from kclrun.aws.policies import Policy, Sink, Site


@click.command(cls=ConfigCommand)
@config_options
@click.option(
    "--purpose",
    cls=RenamedOption,
    older="--for",
    type=click.Choice(["run", "provision", "put", "consumers", "dead-letters", "replay", "caller"]),
    default="run",
    show_default=True,
    help="run: a machine; provision: who makes or changes the lease table; put: `kclrun put`;"
    " consumers: `kclrun consumers`; dead-letters: `kclrun dead-letters`; replay: `kclrun"
    " replay`; caller: who assumes aws.role_arn.",
)
@click.option("--account", metavar="NUMBER", help="The account, where no ARN of the file is of it.")
def iam(config: ConfigChoice, purpose: str, account: str | None) -> int:
    """Print the IAM policy that the application needs, for the resources that it names.

    \b
    kclrun iam --config app.yaml --account 123456789012 > policy.json
    aws iam put-role-policy --role-name orders --policy-name kclrun \\
        --policy-document file://policy.json
    """
    settings = config.load_for(*Settings.__struct_fields__).settings
    if settings.engine == "spark":  # there the options of the output name a stream
        settings = config.load().settings
    if settings.aws.endpoint == EMBEDDED:
        raise SettingsError("aws.endpoint: embedded needs no permission; leave it out")
    print_json(_policy(purpose, settings, _site(settings, account)))
    return exit_codes.DRAINED


def _policy(purpose: str, settings: Settings, site: Site) -> Policy:
    from kclrun.aws import policies

    if purpose in {"put", "consumers", "replay"}:
        refuse_changes(settings, f"--purpose {purpose}", "that of a table has no such verb")
    if purpose in {"provision", "replay"} and settings.engine == "spark":
        raise SettingsError("engine: spark keeps no leases, and so has no lease table to make")
    if purpose == "run":
        return policies.run_policy(settings, site, sink=_sink(settings, site))
    if purpose == "caller":
        role_arn = settings.aws.role_arn
        if role_arn is None:
            raise SettingsError("--purpose caller is for a role that is assumed: set aws.role_arn")
        return policies.caller_policy(role_arn, settings, site)
    made = {
        "put": policies.put_policy,
        "consumers": policies.consumers_policy,
        "dead-letters": policies.letters_policy,
        "replay": policies.replay_policy,
        "provision": policies.provision_policy,
    }
    return made[purpose](settings, site)


def _sink(settings: Settings, site: Site) -> Sink | None:
    """The stream that the pipeline's rows are put into, if any."""
    output = settings.output
    if settings.engine != "spark" or output is None or output.format != "kclrun":
        return None
    from kclrun.aws.policies import Sink
    from kclrun.spark.option_reading import sink_settings

    address = sink_settings(output.options).address
    there = msgspec.structs.replace(site, region=address.region or site.region)
    return Sink(there.stream(address.stream), address.role_arn)


def _site(settings: Settings, account: str | None) -> Site:
    from kclrun.aws.endpoints import EndpointSettings, open_session
    from kclrun.aws.policies import Site

    session = open_session(
        EndpointSettings(region=settings.aws.region, profile=settings.aws.profile)
    )
    region = _region_of_spark(settings) or session.get_config_variable("region")
    if region is None:
        raise SettingsError("no AWS region: set aws.region, AWS_REGION, or a region in the profile")
    return Site(
        partition=session.get_partition_for_region(region),
        region=region,
        account=_account(settings, account),
    )


def _region_of_spark(settings: Settings) -> str | None:
    """On Spark a stream's ARN has precedence over aws.region, also for its lease table."""
    if settings.engine != "spark" or not settings.only_stream.startswith("arn:"):
        return None
    return settings.only_stream.split(":")[3]


def _account(settings: Settings, given: str | None) -> str:
    """The account of the lease table: `given`, else the assumed role's, else the streams'."""
    found = {given} if given is not None else _accounts_named(settings)
    if len(found) != 1:
        why = "no ARN of the file has it" if not found else "the streams are of several"
        raise SettingsError(
            f"the account is not known: {why}\n"
            "Add --account NUMBER; `aws sts get-caller-identity` shows it"
        )
    (account,) = found
    if not (account.isascii() and account.isdigit() and len(account) == 12):
        raise SettingsError(f"--account: expected 12 digits, got {account!r}")
    return account


def _accounts_named(settings: Settings) -> set[str]:
    role_arn = settings.aws.role_arn
    named = [role_arn] if role_arn is not None else [source.name for source in settings.sources]
    return {parts[4] for parts in (arn.split(":") for arn in named) if len(parts) > 5}  # ARNs
