"""User code by name: `module:Class` and `module:function`, and the message if it will not load.

`kclpy:module:Class` and `kclpy:script.py` name a processor written for `amazon_kclpy`. Imported
from the given folders first, then from the environment; never from the current folder [S4]. Used by
lease processes and by the trial import, so that a manager never holds user code.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin

import msgspec

from kclrun.codec.values import (
    BY_NAME,
    Decode,
    decoder_of_type,
    decoding,
    is_value_type,
    reason_without_value,
)
from kclrun.errors import ProcessorLoadError, SettingsError
from kclrun.methods import METHODS, is_asynchronous, refuse_deferred, takes_records
from kclrun.model.names import hint
from kclrun.model.record import Decoding
from kclrun.output import Output
from kclrun.processor import RecordProcessor

_REFERENCE: Final = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):(\w+)\Z")
# A name, not a path: a script is looked up in the same folders as modules.
_SCRIPT: Final = re.compile(r"[\w-][\w.-]*\.py\Z")
# The output of user code at import is cut at this length, which fits a screen.
_TEXT_MAX: Final = 2_000
_KCLPY: Final = "kclpy:"
BATCHES: Final = "process_records"
RECORDS: Final = "process_record"
ASYNC_RECORDS: Final = "async process_record"


def import_paths(path: str | None, config_folder: Path) -> tuple[Path, ...]:
    """The folders for user code: `path` (relative to the file), else its folder and parent."""
    folder = config_folder.resolve()
    return ((folder / path).resolve(),) if path is not None else (folder, folder.parent)


def load_processor(
    reference: str, paths: Sequence[Path], setting: str = "processor"
) -> type[RecordProcessor]:
    """The RecordProcessor subclass that `module:Class` names; messages call the setting `setting`.

    For `kclpy:module:Class` and `kclpy:script.py`, the adapter around the processor of
    `amazon_kclpy`. `paths` stay at the head of `sys.path`: later imports of the processor come from
    there, too.
    Raises: ProcessorLoadError with the searched folders, the import's error and the next action.
    """
    if reference.startswith(_KCLPY):
        return _load_kclpy(setting, reference.removeprefix(_KCLPY), paths)
    found = _load(setting, reference, paths)
    if not isinstance(found, type) or not issubclass(found, RecordProcessor):
        raise ProcessorLoadError(
            f"{setting}: {reference} is {_kind(found)}, not a subclass of RecordProcessor\n"
            "Write `class YourName(RecordProcessor)`, with `from kclrun import RecordProcessor`"
        )
    takes_records(found, f"{setting}: {reference}")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ProcessorLoadError(f"{setting}: {reference} does not define {', '.join(missing)}")
    _check_signatures(setting, reference, found)
    refuse_deferred(found, f"{setting}: {reference}")
    return found


# The methods of an output, and the arguments of the runtime's calls.
_OUTPUT_METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "open": ("context",),
    "send": ("rows",),
    "begin": (),
    "commit": ("rows", "after", "upto"),
    "check_row": ("row",),
    "try_rows": ("rows",),
    "check": (),
    "close": (),
}


def load_output(reference: str, paths: Sequence[Path], setting: str) -> type[Output]:
    """The Output subclass that `module:Class` names; messages call the setting `setting`. Raises:
    as `load_processor`."""
    found = _load(setting, reference, paths)
    if not isinstance(found, type) or not issubclass(found, Output):
        raise ProcessorLoadError(
            f"{setting}: {reference} is {_kind(found)}, not a subclass of Output\n"
            "Write `class YourName(Output)`, with `from kclrun import Output`"
        )
    called = f"{setting}: {reference}"
    refuse_bad_output(found, called)
    return found


def refuse_bad_output(output: type[Output], called: str) -> None:
    """Refuse a class that cannot be an output; `called` names it in the message. Raises:
    ProcessorLoadError."""
    own = {name for name in _OUTPUT_METHODS if getattr(output, name) is not getattr(Output, name)}
    kinds = own & {"send", "begin", "commit"}
    if kinds not in ({"send"}, {"begin", "commit"}):
        has = " and ".join(sorted(kinds)) or "none of them"
        raise ProcessorLoadError(
            f"{called} defines {has}\n"
            "Write send(self, rows) for rows at least once, or begin(self) and commit(self, rows,"
            " after, upto) for rows exactly once"
        )
    for name in sorted(own):
        method, arguments = getattr(output, name), _OUTPUT_METHODS[name]
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
            raise ProcessorLoadError(
                f"{called}: {name} is `async def` or has a `yield`: nothing in it would run\n"
                "Write `def`; for asynchronous work call asyncio.run(...) in it"
            )
        _require_arguments(called, method, name, arguments)


def kind_of(processor: type[RecordProcessor]) -> str:
    """BATCHES, RECORDS or ASYNC_RECORDS."""
    if not takes_records(processor, processor.__qualname__):
        return BATCHES
    return ASYNC_RECORDS if is_asynchronous(processor) else RECORDS


def _check_signatures(setting: str, reference: str, processor: type[RecordProcessor]) -> None:
    """Refuse a method that cannot take its arguments: its first call would halt every shard."""
    for name, arguments in METHODS.items():
        _require_arguments(f"{setting}: {reference}", getattr(processor, name), name, arguments)


def _require_arguments(
    called: str, method: Callable[..., Any], name: str, arguments: tuple[str, ...]
) -> None:
    try:
        inspect.signature(method).bind("self", *arguments)
    except TypeError as error:
        raise ProcessorLoadError(
            f"{called} cannot be called: {name} takes ({', '.join(('self', *arguments))}); {error}"
        ) from None


def _load_kclpy(setting: str, reference: str, paths: Sequence[Path]) -> type[RecordProcessor]:
    # Not imported above: lease processes of other processors do not need it.
    from kclrun.compat.kclpy import adapted, stand_in
    from kclrun.compat.kclpy.scripts import adapted_script

    _put_first(paths)
    stand_in()
    if _SCRIPT.match(reference):
        return adapted_script(_find_script(setting, reference, paths))
    found = _load(setting, reference, paths)
    if not callable(found):
        raise ProcessorLoadError(f"{setting}: {reference} is {_kind(found)}, not a class")
    try:
        return adapted(found)
    except ProcessorLoadError as error:
        raise ProcessorLoadError(f"{setting}: {error}") from None


def _find_script(setting: str, name: str, paths: Sequence[Path]) -> Path:
    for path in paths:
        if (path / name).is_file():
            return path / name
    raise ProcessorLoadError(
        f"{setting}: there is no script {name}\n"
        f"Searched: {', '.join(str(path) for path in paths)}\n"
        "Set `path:` to the folder that holds it"
    )


def try_script(setting: str, reference: str, paths: Sequence[Path]) -> None:
    """Import the modules that the script of a reference imports, if it names one; the script's main
    block waits for a shard. Raises: ProcessorLoadError."""
    name = reference.removeprefix(_KCLPY)
    if not _SCRIPT.match(name):
        return
    from kclrun.compat.kclpy.scripts import import_script

    script = _find_script(setting, name, paths)
    try:
        import_script(script)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        raise ProcessorLoadError(_failed(setting, name, error)) from None


def load_function(setting: str, reference: str, paths: Sequence[Path]) -> Callable[..., Any]:
    """The function that `module:function` names; messages call the setting `setting`.

    Raises: ProcessorLoadError.
    """
    found = _load(setting, reference, paths)
    if not callable(found):
        raise ProcessorLoadError(f"{setting}: {reference} is {_kind(found)}, not a function")
    result: Callable[..., Any] = found
    return result


GLUE: Final = "glue"
_GLUE_MODULES: Final = ("fastavro", "grpc_tools")


def load_decoding(
    setting: str | None,
    processor: type[RecordProcessor],
    paths: Sequence[Path],
    glue: Callable[[], Decode],
) -> Decoding | None:
    """How `record.value` is made: as the setting `decode` says, else as `decode_as` of the
    processor does, else as JSON of the type in `RecordProcessor[Order]`; None if none does. `glue`
    opens the schema registry.

    Raises: ProcessorLoadError; SettingsError if the extra `glue` is not installed.
    """
    said, where = _decoder_named(setting, processor)
    if said is None:
        return None
    if setting is None and said == GLUE:
        raise ProcessorLoadError(
            f"{where}: glue needs a permission, which `kclrun iam` knows by the settings alone\n"
            "Set `decode: glue` in the configuration instead"
        )
    return decoding(load_decoder(said, paths, glue, where))


def _decoder_named(setting: str | None, processor: type[RecordProcessor]) -> tuple[Any, str]:
    """What names the decoder, and how messages call it. Raises: ProcessorLoadError."""
    if setting is not None:
        return setting, "decode"
    if processor.decode_as is not None:
        return processor.decode_as, f"decode_as of {processor.__qualname__}"
    named = value_type(processor)
    where = f"{processor.__qualname__}: RecordProcessor[{getattr(named, '__qualname__', named)}]"
    if named is not None and not is_value_type(named):
        raise ProcessorLoadError(
            f"{where}: JSON cannot be decoded into this type\n"
            "Set decode_as on the class, or decode in the settings, to what makes one of a payload"
        )
    return named, where


def value_type(processor: type[RecordProcessor]) -> Any:
    """The type V of `class Orders(RecordProcessor[V])`, also through classes between the two; None
    where it is not named, or is Any."""
    return _argument_of(processor, RecordProcessor, {})


def _argument_of(kind: type, wanted: type, known: Mapping[Any, Any]) -> Any:
    """The argument of the generic class `wanted` among the bases of `kind`, whose own type
    variables are `known`."""
    for base in getattr(kind, "__orig_bases__", kind.__bases__):
        generic = get_origin(base) or base
        if not (isinstance(generic, type) and issubclass(generic, wanted)):
            continue
        arguments = [known.get(argument, argument) for argument in get_args(base)]
        if generic is wanted:
            is_named = arguments and not isinstance(arguments[0], TypeVar)
            return arguments[0] if is_named and arguments[0] is not Any else None
        parameters = getattr(generic, "__parameters__", ())
        return _argument_of(generic, wanted, dict(zip(parameters, arguments, strict=False)))
    return None


def decoded_options(
    user_code: type[RecordProcessor] | type[Output], options: Mapping[str, Any]
) -> Any:
    """`context.options`: the mapping of the settings, or what `options_as` of the processor or of
    the output makes of it. Raises: SettingsError, without a value, for an option that this type
    does not know or that has another type, and for one that is missing."""
    wanted = user_code.options_as
    if wanted is None:
        return options
    named = f"options: {user_code.__qualname__} takes {getattr(wanted, '__qualname__', wanted)}"
    try:
        made = msgspec.convert(dict(options), wanted)
    except (msgspec.ValidationError, TypeError) as error:
        raise SettingsError(f"{named}: {reason_without_value(error)}") from None
    for unknown in _not_taken(options, made):
        raise SettingsError(f"{named}, which has no {unknown}")
    return made


def _not_taken(given: object, made: object, path: str = "") -> Iterator[str]:
    """The names of what was given and is not in the object that was made of it."""
    if isinstance(given, Mapping):
        names = _names_of(made)
        if names is None:
            return
        for key, value in given.items():
            if key in names:
                yield from _not_taken(value, names[key], f"{path}{key}.")
            else:
                yield f"{path}{key}{hint(str(key), map(str, names))}"
    elif isinstance(given, list) and isinstance(made, (list, tuple)):
        for index, (value, one) in enumerate(zip(given, made, strict=False)):
            yield from _not_taken(value, one, f"{path.removesuffix('.')}[{index}].")


def _names_of(made: object) -> Mapping[Any, Any] | None:
    """The members of an object, by the names that settings give them; None if it has none."""
    if isinstance(made, Mapping):
        return made
    if isinstance(made, msgspec.Struct):
        tag = made.__struct_config__.tag_field
        fields = msgspec.structs.fields(made)
        own = {field.encode_name: getattr(made, field.name) for field in fields}
        return own if tag is None else {**own, tag: None}
    names = getattr(made, "__dataclass_fields__", None)
    if names is None and (attributes := getattr(made, "__attrs_attrs__", None)) is not None:
        names = [attribute.name for attribute in attributes]
    return None if names is None else {name: getattr(made, name) for name in names}


def load_decoder(
    said: object, paths: Sequence[Path], glue: Callable[[], Decode], where: str = "decode"
) -> Decode:
    """The decoder that a word, `module:Type`, `module:function` or a type stands for; messages call
    the setting `where`. Raises: as `load_decoding`."""
    if said == GLUE:
        if missing := [name for name in _GLUE_MODULES if importlib.util.find_spec(name) is None]:
            raise SettingsError(
                f"{where}: glue needs {' and '.join(missing)}, which the extra has:"
                " pip install 'kclrun[glue]'"
            )
        return glue()
    if isinstance(said, str):
        if said in BY_NAME:
            return BY_NAME[said]
        subject, found = f"{where}: {said}", _load(where, said, paths)
    else:
        subject, found = where, said
    if is_value_type(found):
        try:
            return decoder_of_type(found)
        except TypeError as error:
            raise ProcessorLoadError(
                f"{subject}: JSON cannot be decoded into it: {error}"
            ) from None
    if isinstance(found, type) or found is said or not callable(found):
        raise ProcessorLoadError(
            f"{subject} is {_kind(found)}: neither a type for JSON (a msgspec.Struct, a"
            " dataclass, a TypedDict) nor a function\n"
            "Give the name of a function of your module that makes a value of the payload's bytes"
        )
    _check_function(subject, found)
    return found


def _check_function(subject: str, function: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ProcessorLoadError(
            f"{subject} is `async def` or has a `yield`: write a function that returns the value"
        )
    try:
        inspect.signature(function).bind(b"")
    except TypeError as error:
        raise ProcessorLoadError(
            f"{subject} cannot be called with the payload's bytes alone: {error}"
        ) from None
    except ValueError:  # a function in C without a signature
        return


def load_pipeline(reference: str, paths: Sequence[Path]) -> Callable[..., Any]:
    """The function `(records)` or `(records, options)` that `pipeline:` names.

    Raises: ProcessorLoadError.
    """
    pipeline = load_function("pipeline", reference, paths)
    try:
        signature = inspect.signature(pipeline)
    except ValueError:  # written in C, without a signature
        return pipeline
    for given in (("records",), ("records", "options")):
        try:
            signature.bind(*given)
        except TypeError:
            continue
        return pipeline
    raise ProcessorLoadError(
        f"pipeline: {reference} cannot be called with (records) or (records, options):"
        f" it takes {signature}"
    )


def _load(setting: str, reference: str, paths: Sequence[Path]) -> object:
    match = _REFERENCE.match(reference)
    if match is None:
        raise ProcessorLoadError(f"{setting}: expected module:name, got {reference[:60]!r}")
    module_name, name = match[1], match[2]
    _put_first(paths)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ProcessorLoadError(_not_found(setting, module_name, paths)) from None
        raise ProcessorLoadError(_failed(setting, module_name, error)) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        raise ProcessorLoadError(_failed(setting, module_name, error)) from None
    try:
        return getattr(module, name)
    except AttributeError:
        raise ProcessorLoadError(
            f"{setting}: {module.__file__ or module_name} defines no {name}\n"
            f"It defines: {_defined(module)}"
        ) from None


def _put_first(paths: Sequence[Path]) -> None:
    """Search `paths` first; and not the current folder, unless it is one of them."""
    wanted = [str(path) for path in paths]
    kept = [entry for entry in sys.path if entry not in {"", ".", *wanted}]
    sys.path[:] = wanted + kept
    # A folder may have changed since Python looked into it.
    importlib.invalidate_caches()


def _not_found(setting: str, module_name: str, paths: Sequence[Path]) -> str:
    searched = ", ".join(str(path) for path in paths)
    lines = [
        f"{setting}: there is no module {module_name}",
        f"Searched: {searched}, then the environment of {sys.executable}",
    ]
    top, *below = module_name.split(".")
    file = next(
        (path for path in paths if path.joinpath(top, *below).with_suffix(".py").is_file()), None
    )
    if below and file is not None:
        lines.append(
            f"{file / top} has no __init__.py, and another package named {top} is installed:"
            f" create {file / top / '__init__.py'}"
        )
    else:
        lines.append("Set `path:` to the folder that holds it, or install it there")
    return "\n".join(lines)


def _failed(setting: str, module_name: str, error: BaseException) -> str:
    """The error that the import raised, and its place in user code."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    where = f" ({frames[-1].filename} line {frames[-1].lineno})" if frames else ""
    said = "".join(traceback.format_exception_only(error)).strip()[:_TEXT_MAX]
    return f"{setting}: importing {module_name} failed{where}\n{said}"


def _kind(found: object) -> str:
    return (
        f"the class {found.__name__}"
        if isinstance(found, type)
        else f"of type {type(found).__name__}"
    )


def _defined(module: object) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == getattr(module, "__name__", "")
    ]
    return ", ".join(sorted(names)[:20]) or "nothing"
