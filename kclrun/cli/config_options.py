"""`--config` and `--set`, the same for every verb that reads the configuration.

Only this module chooses the file: the one of `--config` (`-c`), or the first argument that ends in
`.yaml` or `.yml`, before or after the verb, or `app.yaml` in the current folder. A verb without
arguments of its own takes a file of any name.
"""

from __future__ import annotations

import functools
import json
import math
import os
import os.path
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click
import msgspec

from kclrun.cli.messages import echo
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime

if TYPE_CHECKING:
    from kclrun.config.schema import Settings


class FiniteRange(click.FloatRange):
    """A range without infinity, and without NaN, which no comparison with a bound refuses."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


C = TypeVar("C", bound=Callable[..., Any])
DEFAULT_CONFIG: Final = Path("app.yaml")
_ENDINGS: Final = (".yaml", ".yml")
_CONFIG: Final = ("--config", "-c")
_SET: Final = "--set"


def _config_option(help_text: str) -> Callable[[C], C]:
    return click.option(*_CONFIG, metavar="FILE", type=click.Path(path_type=Path), help=help_text)


# The options that a verb without settings does not know.
CONFIG_NAMES: Final = (*_CONFIG, _SET)
_CONFIG_OPTIONS: Final = (
    _config_option("The configuration file; without, app.yaml here."),
    click.option(
        _SET,
        "overrides",
        multiple=True,
        metavar="A.B=VALUE",
        help="Override one setting, such as leases.max=8 (repeatable).",
    ),
)
_OPTIONAL_CONFIG: Final = _config_option("The configuration file; without, none is read.")
_STREAM_OPTIONS: Final = (
    *_CONFIG_OPTIONS,
    click.option(
        "--stream",
        metavar="NAME|ARN",
        help="One of several streams of the application; without --config, any stream.",
    ),
    click.option("--endpoint", metavar="URL", help="With --stream: where, if not AWS."),
    click.option("--region", metavar="NAME", help="With --stream: the region."),
)
yes_option = click.option("--yes", is_flag=True, help="Do it; without, only show the plan.")
shards_option = click.option(
    "--shard", "shards", multiple=True, metavar="SHARD", help="This shard alone; may be repeated."
)
keys_option = click.option(
    "--key", "keys", multiple=True, metavar="KEY", help="This partition key alone; may be repeated."
)
stream_option = click.option(
    "--stream", metavar="NAME|ARN", help="One of several streams of the application."
)


class RenamedOption(click.Option):
    """An option with an older name, which is still accepted, and not shown."""

    def __init__(self, param_decls: Sequence[str], *, older: str, **attributes: Any) -> None:
        super().__init__(param_decls, **attributes)
        self.older = older

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, self.older]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


class ConfigChoice(msgspec.Struct, frozen=True):
    """The configuration that the command line chooses: `--config`, if it is named, and `--set`."""

    named: Path | None = None
    overrides: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """The file, or app.yaml in the current folder."""
        return self.named or DEFAULT_CONFIG

    def load(self) -> Configuration:
        """Load and check the file, for a verb that runs the processor or opens its outputs.

        Raises: SettingsError; click.UsageError if none is named and app.yaml does not exist.
        """
        return self._loaded(None)

    def load_for(self, *used: str) -> Configuration:
        """Load and check the file for a verb that uses the streams, the lease table and the
        sections `used`. A variable or a secret that is missing elsewhere (the password of an
        output's database) is not an error. Raises: as `load`.
        """
        return self._loaded(used)

    def _loaded(self, used: Collection[str] | None) -> Configuration:
        from kclrun.config.load import load_settings

        if self.named is None and not _has_default():
            raise click.UsageError(
                f"Which configuration? There is no {DEFAULT_CONFIG} in this folder: name the file,"
                " as in  --config FILE"
            )
        file, now = self.file, WallTime(time.time())
        settings = load_settings(file, self.overrides, environment=os.environ, now=now, used=used)
        return Configuration(settings, file.resolve().parent, file, self.overrides)


class StreamChoice(msgspec.Struct, frozen=True):
    """The stream that the command line chooses: one of a configuration, or without it."""

    config: ConfigChoice
    stream: str | None = None
    endpoint: str | None = None
    region: str | None = None

    def settings(self, verb: str) -> Settings:
        """The file's settings, or settings for the stream of the command line, by the same rules.

        Raises: SettingsError; click.UsageError if `--config`, `--stream` and an app.yaml are all
        missing, if the stream is not one of the file's, or if it has several and none is named.
        """
        if self.config.named is None and self.stream is None and not _has_default():
            raise click.UsageError("Which stream? Name it with --stream NAME or by --config FILE.")
        if self.config.named is not None or self.stream is None:
            return _configured(self.config.load_for().settings, self.stream)
        from kclrun.config.load import settings_of

        given = {"stream": self.stream, "aws.endpoint": self.endpoint, "aws.region": self.region}
        # A text of JSON is one of YAML, whatever it contains.
        named = [
            f"{name}={json.dumps(value)}" for name, value in given.items() if value is not None
        ]
        return settings_of(
            f"application: {verb}",
            [*named, *self.config.overrides],
            environment={},
            now=WallTime(time.time()),
            name="--stream",
        )


def stream_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a `StreamChoice` to a command, as `of`."""

    @functools.wraps(command)
    def choosing(*given: Any, config: Any, overrides: Any, **more: Any) -> Any:
        place = {name: more.pop(name) for name in ("stream", "endpoint", "region")}
        return command(*given, of=StreamChoice(ConfigChoice(config, overrides), **place), **more)

    return _with_options(choosing, _STREAM_OPTIONS)


def _configured(settings: Settings, stream: str | None) -> Settings:
    """The file's settings, narrowed to the named stream."""
    if stream is None:
        if settings.streams:
            raise click.UsageError(
                f"The application has several streams: name one with --stream"
                f" ({settings.stream_names})."
            )
        return settings
    try:
        return settings.of_stream(stream)
    except SettingsError as error:
        raise click.UsageError(f"--stream: {error}") from None


# As methods of Path these would raise for a name that is too long, or where this user may not look.
def _has_default() -> bool:
    return os.path.exists(DEFAULT_CONFIG)


def _is_file(name: str) -> bool:
    return os.path.isfile(name)


class Configuration(msgspec.Struct, frozen=True):
    """The settings, and the folder of the file; relative paths start from this folder.

    `overrides` are the `--set` of the command line.
    """

    settings: Settings
    folder: Path
    file: Path
    overrides: tuple[str, ...] = ()


class ConfigCommand(click.Command):
    """A verb that reads the configuration."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _with_config_named(self, args))


class ConfigGroup(click.Group):
    """A verb with verbs of its own, all of which read the configuration."""

    command_class = ConfigCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = _with_config_named(self, args, stops=self.commands)
        end = _divided(self, named, self.commands).end
        # Options before the subcommand are the subcommand's; those after it have precedence.
        return super().parse_args(ctx, [*named[end : end + 1], *named[:end], *named[end + 1 :]])


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--config FILE` and `--set a.b=c` to a command, as `config`, a `ConfigChoice`."""

    @functools.wraps(command)
    def choosing(*given: Any, config: Any, overrides: Any, **more: Any) -> Any:
        return command(*given, config=ConfigChoice(config, overrides), **more)

    return _with_options(choosing, _CONFIG_OPTIONS)


def optional_config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """As `config_options`, for a verb that also works without a file: then it reads no app.yaml."""

    @functools.wraps(command)
    def choosing(*given: Any, config: Any, overrides: Any, **more: Any) -> Any:
        if config is None and overrides:
            raise click.UsageError("--set goes with --config here.")
        return command(*given, config=ConfigChoice(config, overrides), **more)

    return _with_options(choosing, (_OPTIONAL_CONFIG, *_CONFIG_OPTIONS[1:]))


def _with_options(command: Callable[..., Any], options: Sequence[Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def json_option(words: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """The option `--json` of a verb that lists something, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=words)


def ends_with_plan(*, is_confirmed: bool, has_changes: bool = True) -> bool:
    """Whether a verb ends after it showed its plan on standard output: there is nothing to do, or
    no `--yes`. It then ends with 0; only `doctor` and moves answer a question with their code."""
    if not has_changes:
        echo("Nothing to do.")
    elif not is_confirmed:
        echo("Nothing was changed. To do it, add --yes")
    return not (has_changes and is_confirmed)


def with_verb_first(arguments: Sequence[str], verbs: Collection[str], default: str) -> list[str]:
    """The command line with its verb first: arguments before the verb are moved behind it.

    Without a verb, a line that names a configuration or begins with an option is for the default
    verb. Any other line is not changed.
    """
    before: list[str] = []
    rest = list(arguments)
    while rest and (width := _width_of_config(rest)):
        before += rest[:width]
        rest = rest[width:]
    if rest and rest[0] in verbs:
        return [rest[0], *before, *rest[1:]]
    is_option = bool(rest) and rest[0].startswith("-")
    is_about_all = rest[:1] in (["--help"], ["-h"], ["--version"])
    if before or (is_option and not is_about_all):
        return [default, *before, *rest]
    return rest


def _width_of_config(arguments: Sequence[str]) -> int:
    """How many of the first arguments name or override a configuration: 0, 1 or 2."""
    first = arguments[0]
    if first in (*_CONFIG, _SET):
        return 2
    return int(first.startswith(("--config=", "--set=", "-c")) or _is_configuration(first))


def _is_configuration(argument: str) -> bool:
    return argument.endswith(_ENDINGS) and not argument.startswith("-")


def _with_config_named(
    command: click.Command, arguments: Sequence[str], stops: Collection[str] = ()
) -> list[str]:
    """The arguments of a verb, with `--config` before the argument that is the configuration.

    `stops` are the subcommands, which parse their own arguments. Raises: click.UsageError for two
    configurations.
    """
    divided = _divided(command, arguments, stops)
    has_own = bool(stops) or any(isinstance(param, click.Argument) for param in command.params)
    files = [
        at
        for at in divided.positional
        if _is_configuration(arguments[at]) or (not has_own and _is_file(arguments[at]))
    ]
    named = [*divided.configs, *(arguments[at] for at in files)]
    if len(named) > 1 and not has_own:
        raise click.UsageError(f"Two configurations: {named[0]} and {named[1]}.")
    if not files or divided.configs:
        return list(arguments)
    first = files[0]
    return [*arguments[:first], "--config", *arguments[first:]]


class _Arguments(NamedTuple):
    """The indexes of the arguments that are neither options nor values of options, up to the first
    subcommand; the configurations that `--config` names among them; and the index of that end."""

    positional: list[int]
    configs: list[str]
    end: int


def _divided(
    command: click.Command, arguments: Sequence[str], stops: Collection[str]
) -> _Arguments:
    """The arguments up to one of `stops`."""
    takes_value = {*_CONFIG, _SET} | {
        name
        for param in command.params
        if isinstance(param, click.Option) and not (param.is_flag or param.count)
        for name in (*param.opts, getattr(param, "older", ""))
    }
    positional: list[int] = []
    configs: list[str] = []
    at = 0
    while at < len(arguments) and arguments[at] != "--" and arguments[at] not in stops:
        argument = arguments[at]
        name, equals, value = argument.partition("=")
        if not argument.startswith("-") or argument == "-":
            positional.append(at)
        elif name in _CONFIG:
            configs.append(value if equals else "".join(arguments[at + 1 : at + 2]))
        elif argument.startswith("-c"):
            configs.append(argument.removeprefix("-c"))
        at += 2 if name in takes_value and not equals else 1
    return _Arguments(positional, configs, at)
