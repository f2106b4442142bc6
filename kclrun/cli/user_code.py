"""Checks in a separate process that the user's code can be imported, so ours never imports it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from kclrun.calling.method_checks import why_misfit
from kclrun.cli.config_options import Configuration
from kclrun.cli.messages import echo
from kclrun.cli.trial_import import Loaded, try_import
from kclrun.cli.waiting import waiting_for
from kclrun.config.destinations import OutputSettings
from kclrun.config.observing import TRACE_CONTEXT
from kclrun.config.outputs import named_outputs
from kclrun.config.policies import concurrency_of
from kclrun.config.schema import (
    Settings,
    StreamSettings,
)
from kclrun.emit_calls import refuse_state_uses, refuse_unknown_outputs
from kclrun.errors import ProcessorLoadError, SettingsError, Unavailable
from kclrun.loading import ASYNC_RECORDS, BATCHES, GLUE, import_paths
from kclrun.manager.launcher import lease_environment
from kclrun.model.output import OutputDestination, setting_of


def output_folder(settings: Settings) -> Path | None:
    """`output.path` as a folder of this machine, relative to the current folder. None if rows are
    not written to one: no output, a stream, s3a://…"""
    output = settings.output
    if output is None or output.path is None or "://" in output.path:
        return None
    return Path(output.path).absolute()


def dead_letter_folder(settings: Settings) -> Path | None:
    """`on_error.dead_letter.path`, relative to the current folder. None if none are kept."""
    path = settings.on_error.dead_letter.path
    return None if path is None else Path(path).absolute()


def print_rows_folder(settings: Settings) -> None:
    """Print the folder of the rows of a run that has ended; nothing if it wrote none."""
    folder = output_folder(settings)
    try:
        if folder is None or not any(folder.iterdir()):
            return
    except OSError:  # it is missing, or this user may write to it and not list it
        return
    here = Path.cwd()
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    echo(f"Rows are in {shown}", err=True)


def with_output_paths(settings: Settings, changed: Callable[[str], str]) -> Settings:
    """The settings with another path for each output that has one."""

    def moved(output: OutputSettings) -> OutputSettings:
        path = output.path
        return output if path is None else msgspec.structs.replace(output, path=changed(path))

    return msgspec.structs.replace(
        settings,
        output=None if settings.output is None else moved(settings.output),
        outputs={name: moved(output) for name, output in settings.outputs.items()},
    )


def with_absolute_output(configuration: Configuration) -> Settings:
    """The settings for other processes, with paths of outputs that do not depend on their current
    folder."""
    settings = configuration.settings
    letters = dead_letter_folder(settings)
    if letters is not None:
        dead_letter = msgspec.structs.replace(settings.on_error.dead_letter, path=str(letters))
        on_error = msgspec.structs.replace(settings.on_error, dead_letter=dead_letter)
        settings = msgspec.structs.replace(settings, on_error=on_error)
    return with_output_paths(
        settings, lambda path: path if "://" in path else str(Path(path).absolute())
    )


def require_folder(setting: str, folder: Path) -> None:
    """Create it now, because otherwise each process would fail later. Raises: SettingsError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"{setting}: cannot make the folder {folder}: {error.strerror}"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"{setting}: user {os.geteuid()} may not write to {folder}")


# An import of pandas or of a model from a cold disk takes some ten seconds. An import that takes a
# minute hangs.
_IMPORT_MAX_S: Final = 60
# Both the import and the look at the destination.
_CHECK_MAX_S: Final = 60


def named_user_code(configuration: Configuration) -> Mapping[str, str]:
    """The user code of these settings, by setting. Raises: SettingsError without a processor."""
    settings = configuration.settings
    processors = _processors(settings)
    if not processors and settings.pipeline is None:
        other = ", or a pipeline" if settings.engine == "spark" else ""
        raise SettingsError(
            "processor: is missing; name your RecordProcessor, such as processors.hello:Hello"
            f"{other}"
        )
    fill = settings.embedded.fill if settings.embedded is not None else None
    named = {
        **processors,
        **_decoders(settings),
        **_carrier(settings),
        **_outputs(settings),
        "pipeline": settings.pipeline,
        "summary": settings.summary,
        "embedded.fill.source": fill.source if fill is not None else None,
    }
    return {setting: reference for setting, reference in named.items() if reference is not None}


def _outputs(settings: Settings) -> dict[str, str]:
    """The outputs of user code, by setting."""
    return {
        f"{setting_of(name)}.use": output.use
        for name, output in named_outputs(settings)
        if output.use is not None
    }


def _processors(settings: Settings) -> dict[str, str]:
    """The processors of the streams, by setting: the application's, and those of single streams."""
    return {
        setting: source.processor
        for setting, source in _processor_settings(settings)
        if source.processor is not None
    }


def _processor_settings(settings: Settings) -> list[tuple[str, StreamSettings]]:
    """Each stream, with the setting that names its processor."""
    own = [stream.processor is not None for stream in settings.streams] or [False]
    return [
        (f"streams[{index}].processor" if is_own else "processor", source)
        for index, (is_own, source) in enumerate(zip(own, settings.sources, strict=True))
    ]


def _options(settings: Settings) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """The options of the streams and the outputs, by the setting that names the user code."""
    options: dict[str, list[Mapping[str, Any]]] = {
        f"{setting_of(name)}.use": [output.options] for name, output in named_outputs(settings)
    }
    for setting, source in _processor_settings(settings):
        options.setdefault(setting, []).append(source.options)
    return options


def _decoders(settings: Settings) -> dict[str, str]:
    """The decoders of the streams that user code or an extra has, by setting."""
    named = {"decode": settings.decode} | {
        f"streams[{index}].decode": stream.decode for index, stream in enumerate(settings.streams)
    }
    return {
        setting: said
        for setting, said in named.items()
        if said is not None and (said == GLUE or ":" in said)
    }


def _carrier(settings: Settings) -> dict[str, str]:
    """The function that finds the trace contexts of records. Raises: SettingsError."""
    otlp = settings.observe.otlp
    if otlp is None or settings.engine != "fleet":
        return {}
    try:
        is_there = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise SettingsError("observe.otlp needs the extra: pip install 'kclrun[otel]'")
    context = None if otlp.traces is None else otlp.traces.context
    return {TRACE_CONTEXT: context} if context is not None and ":" in context else {}


def require_user_code(configuration: Configuration, outputs: Sequence[str] | None = None) -> None:
    """Import all user code once in other processes. `outputs` are the names that `emit` may
    use; left out, those of the settings.

    Raises: SettingsError, ProcessorLoadError; SettingsError also for an output that the source of
    a processor names and the settings do not have.

    The processor is imported with the environment of a lease process. Otherwise it could load here
    and halt every shard there. Other code is imported with this process's environment, which
    Spark's workers on this machine have too.
    """
    named = dict(named_user_code(configuration))
    trials: list[Loaded] = []
    if configuration.settings.engine == "fleet":
        of_leases = {
            **_processors(configuration.settings),
            **_decoders(configuration.settings),
            **_carrier(configuration.settings),
            **_outputs(configuration.settings),
        }
        processors = {setting: named.pop(setting) for setting in of_leases}
        only = configuration.settings.environment.only
        environment = lease_environment(os.environ, only)
        trials.append(_import(configuration, processors, environment))
    if named:
        trials.append(_import(configuration, named, os.environ))
    kinds = {setting: kind for trial in trials for setting, kind in trial.kinds.items()}
    _require_fit(configuration.settings, kinds)
    if outputs is None:
        outputs = [name for name, _ in named_outputs(configuration.settings)]
    refuse_unknown_outputs([call for trial in trials for call in trial.emits], outputs)
    if configuration.settings.state is None and configuration.settings.engine == "fleet":
        refuse_state_uses([place for trial in trials for place in trial.state_uses])


def check_user_output(settings: Settings, place: OutputDestination, paths: Sequence[Path]) -> str:
    """Let an output of user code look at its destination, in a process of its own with the
    environment of a lease process. Returns: the destination in words. Raises: SettingsError;
    Unavailable if it is away."""
    assert place.use is not None, "it is one of user code"
    environment = lease_environment(os.environ, settings.environment.only)
    named = setting_of(place.name)
    command, asked = own_module("kclrun.cli.trial_import"), {f"{named}.check": place.use}
    options = {f"{named}.check": [place.options]}
    trial = try_import(command, asked, paths, environment, options=options, within_s=_CHECK_MAX_S)
    loaded = trial.loaded
    if loaded is None and trial.exit_code is None:
        raise Unavailable(f"{named}: {place.use}.check takes longer than {_CHECK_MAX_S} s")
    if loaded is None:
        said = trial.said.strip() or f"its check ended with exit code {trial.exit_code}"
        raise Unavailable(f"{named}: {said}")
    if loaded.error is not None:
        raise SettingsError(loaded.error + _on_withheld_variables(loaded.error, environment))
    if loaded.away is not None:
        raise Unavailable(loaded.away)
    return loaded.words


def _require_fit(settings: Settings, kinds: Mapping[str, str]) -> None:
    """Refuse a processor whose method does not fit the settings of its stream. `kinds` is by
    setting. Raises: SettingsError."""
    for index, source in enumerate(settings.sources):
        setting = f"streams[{index}].processor"
        kind = kinds.get(setting) or kinds.get("processor")
        if kind is None:
            continue
        wrong = why_misfit(
            is_single=kind != BATCHES,
            is_async=kind == ASYNC_RECORDS,
            concurrency=concurrency_of(source.concurrency, settings),
            is_manual=settings.checkpoint.every == "manual",
            has_state=settings.state is not None,
        )
        if wrong is not None:
            raise SettingsError(f"{source.processor}: {wrong}")


def _import(
    configuration: Configuration, named: Mapping[str, str], environment: Mapping[str, str]
) -> Loaded:
    """Import it in a process of its own. Raises: ProcessorLoadError."""
    paths = import_paths(configuration.settings.path, configuration.folder)
    code = ", ".join(named.values())
    with waiting_for(f"the import of {code}"):
        trial = try_import(
            own_module("kclrun.cli.trial_import"),
            named,
            paths,
            environment,
            options=_options(configuration.settings),
            within_s=_IMPORT_MAX_S,
        )
    if trial.loaded is None:
        if trial.exit_code is None:
            raise ProcessorLoadError(
                f"importing {code} takes longer than {_IMPORT_MAX_S} s\n"
                "An import must not wait for the network; connect in `initialize`"
            )
        said = trial.said.strip() or f"the import ended with exit code {trial.exit_code}"
    elif trial.loaded.error is not None:
        said = trial.loaded.error
    else:
        return trial.loaded
    raise ProcessorLoadError(said + _on_withheld_variables(said, environment))


def _on_withheld_variables(said: str, environment: Mapping[str, str]) -> str:
    """Advice if user code needs a variable that this process has and does not pass on."""
    withheld = sorted(
        name for name in os.environ.keys() - environment.keys() if f"'{name}'" in said
    )
    if not withheld:
        return ""
    names = ", ".join(withheld)
    return f"\nenvironment.only keeps {names} from lease processes: name it there"


def own_module(module: str) -> list[str]:
    """The command for one of our modules, with the current folder kept off its path [S4]."""
    return [sys.executable, "-P", "-m", module]
