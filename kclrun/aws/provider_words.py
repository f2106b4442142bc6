"""What a provider of credentials says when it fails, as one of our errors, with what to do.

botocore's providers raise what they meet: an error of botocore or of a service, an OSError of a
file or a program, a RuntimeError, or a TypeError for an answer that they did not expect. Their
texts may quote keys: they are shown without whatever may be one.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from botocore import exceptions as boto
from botocore.exceptions import ClientError

from kclrun.aws.control import NO_CREDENTIALS, from_botocore
from kclrun.aws.operations import ASSUME_ROLE
from kclrun.aws.sessions import VIA
from kclrun.errors import AccessDenied, ServiceError, Throttled, Unavailable, is_host_shortage
from kclrun.model.text import without_secrets

_CANNOT: Final = "credentials cannot be had"
_WORDS_MAX: Final = 400
# A login has expired or is not there. Found by name: not every release of botocore has them all.
_SSO: Final = tuple(
    found
    for name in (
        "SSOError",
        "TokenRetrievalError",
        "AuthorizationCodeLoadError",
        "PendingAuthorizationExpiredError",
    )
    if (found := getattr(boto, name, None)) is not None
)
_LOGIN: Final = tuple(
    found
    for name in ("LoginError", "LoginRefreshRequired", "LoginTokenLoadError")
    if (found := getattr(boto, name, None)) is not None
)
# The network or the service: it may work at the next try.
_PASSING: Final = (boto.ConnectionError, boto.HTTPClientError, boto.MetadataRetrievalError)
_STALE: Final = "credentials are still expired"


def provider_error(
    error: Exception,
    profile: Mapping[str, Any],
    name: str | None,
    environ: Mapping[str, str] | None = None,
) -> AccessDenied | Unavailable | Throttled | ServiceError:
    """Our error for the failure of a provider. `profile` are the settings of the profile `name`.

    AccessDenied where a person has to act; Unavailable where the next try may succeed.
    """
    if isinstance(error, ClientError):
        return _of_service(error)
    if isinstance(error, boto.PartialCredentialsError):
        return _of_half(error, profile, name, environ or {})
    words = _words(error)
    if isinstance(error, _SSO):
        return _denied(words, f"Run: aws sso login{_of_profile(name)}")
    if isinstance(error, _LOGIN):
        return _denied(words, f"Run: aws login{_of_profile(name)}")
    if isinstance(error, _PASSING) or is_host_shortage(error):
        return _passing(words)
    if isinstance(error, boto.CredentialRetrievalError):
        return _of_provider(error, words, profile, name)
    if isinstance(error, OSError):
        return _of_file(error, profile, name)
    if _STALE in str(error):
        what = "the keys that the provider gave have expired"
        return _denied(what, "Renew them where they come from, and look at this machine's clock")
    if isinstance(error, boto.BotoCoreError) and type(error) is not boto.BotoCoreError:
        return _denied(words, f"Correct {_where(name)}")
    if "credential_process" in profile:
        return _denied(
            f"the program of credential_process printed no credentials ({type(error).__name__})",
            f"Run it by hand, and correct it or {_where(name)}",
        )
    return _passing(type(error).__name__)


def nothing_found(profile: Mapping[str, Any], name: str | None, environ: Mapping[str, str]) -> str:
    """Why the chain has found nothing, and what to do."""
    if "role_arn" in profile:
        return (
            f"no AWS credentials were found: {_called(name)} has role_arn, and none of"
            " source_profile, credential_source and web_identity_token_file\n"
            f"Add one of them to {_where(name)}"
        )
    asked = "this machine has no role of EC2, ECS or EKS, or does not answer"
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        asked = "the role of an instance is not looked for: AWS_EC2_METADATA_DISABLED is true"
    return (
        f"no AWS credentials were found ({asked})\n"
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give this host a role"
    )


def _of_service(error: ClientError) -> ServiceError:
    """The refusal of STS, of SSO or of another service that a provider called."""
    failed = from_botocore(msgspec.structs.replace(ASSUME_ROLE, name=error.operation_name), error)
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0
    if isinstance(failed, Throttled) or (status >= 500 and "Expired" not in code):
        return failed
    advice = "\nLook at the keys that the role is assumed with, and at the role's trust policy"
    if "Expired" in code:
        advice = "\nRenew the keys or the token that the role is assumed with"
    if "\n" in str(failed):  # it has advice of its own: a clock that is off
        advice = ""
    return AccessDenied(f"{_CANNOT}: {failed}{advice}", operation="credentials", code=code)


def _of_half(
    error: boto.PartialCredentialsError,
    profile: Mapping[str, Any],
    name: str | None,
    environ: Mapping[str, str],
) -> AccessDenied:
    """A key without its other half, or a role without a source."""
    missing = str(error.kwargs["cred_var"])
    text = (
        f"the AWS credentials found lack a part: {missing}\n"
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, both of them, or correct the profile"
    )
    if "source" in missing and "role_arn" in profile:
        text = nothing_found(profile, name, environ)
    return AccessDenied(text, operation="credentials", code=NO_CREDENTIALS)


def _of_provider(
    error: boto.CredentialRetrievalError,
    words: str,
    profile: Mapping[str, Any],
    name: str | None,
) -> AccessDenied | Unavailable:
    provider = str(error.kwargs.get("provider"))
    if provider == "custom-process" or "credential_process" in profile:
        said = without_secrets(" ".join(str(error.kwargs.get("error_msg", "")).split()))
        return _denied(
            f"credential_process failed: {said[:_WORDS_MAX] or 'without a word'}",
            f"Run it by hand, and correct it or {_where(name)}",
        )
    if provider in {"container-role", "iam-role"}:
        return _passing(words)
    return _denied(words, f"Correct {_where(name)}")


def _of_file(
    error: OSError, profile: Mapping[str, Any], name: str | None
) -> AccessDenied | Unavailable:
    """A file that cannot be read, or a program that cannot be run: its name is the operator's."""
    if error.filename is None:
        return _passing(f"{type(error).__name__}: {error.strerror}")
    path, why = str(error.filename), error.strerror
    if path == _first_word(profile.get("credential_process")):
        what = f"credential_process: {path}: {why}"
        return _denied(what, f"Install the program, or correct {_where(name)}")
    return _denied(f"{path}: {why}", f"Put the file there, or correct {_where(name)}")


def _first_word(command: object) -> str | None:
    try:
        return shlex.split(str(command))[0]
    except (ValueError, IndexError):
        return None


def _words(error: Exception) -> str:
    """The provider's own words, on one line and without secrets."""
    said = without_secrets(" ".join(str(error).split()))[:_WORDS_MAX]
    via = getattr(error, "kwargs", {}).get(VIA)
    return f"{said or type(error).__name__}{'' if via is None else f' through the proxy {via}'}"


def _denied(what: str, advice: str) -> AccessDenied:
    return AccessDenied(
        f"{_CANNOT}: {what}\n{advice}", operation="credentials", code=NO_CREDENTIALS
    )


def _passing(words: str) -> Unavailable:
    return Unavailable(f"{_CANNOT}: {words}", operation="credentials")


def _of_profile(name: str | None) -> str:
    return "" if name is None else f" --profile {shlex.quote(name)}"


def _called(name: str | None) -> str:
    return "the default profile" if name is None else f"the profile {name}"


def _where(name: str | None) -> str:
    return f"{_called(name)} in the configuration files of AWS"
