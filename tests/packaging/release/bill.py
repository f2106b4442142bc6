"""The bill of materials of a release, in CycloneDX: what config/requirements/runtime.lock pins."""

import re
import uuid
from datetime import UTC, datetime

from cyclonedx.model import ExternalReference, ExternalReferenceType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Of the lock's own format: a name, its version, and on which machines.
_PIN = re.compile(r"^(?P<pin>[A-Za-z0-9][^\\\n]*?)\s*\\$", re.MULTILINE)


class NotValid(Exception):
    """The bill does not fit the schema of CycloneDX."""


def pins(lock):
    """The packages of a lock, each a requirement of one version."""
    return [Requirement(found["pin"]) for found in _PIN.finditer(lock)]


def bill(project, version, commit, epoch, *, all_pins, base_pins):
    """The text of the bill: `base_pins` are what every installation has, the others come with an
    extra. The same commit has the same bill."""
    required = {canonicalize_name(pin.name) for pin in base_pins}
    root = _root(project, version)
    made = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{root.purl}#{commit}"),
        components=[_component(pin, required) for pin in all_pins],
    )
    made.metadata.component = root
    made.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    direct = {canonicalize_name(Requirement(each).name) for each in _direct(project)}
    made.register_dependency(root, [each for each in made.components if each.name in direct])
    text = JsonV1Dot6(made).output_as_string(indent=2) + "\n"
    if (wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise NotValid(wrong.data.message)  # without the instance, which is the whole bill
    return text


def _root(project, version):
    purl = PackageURL("pypi", name=project["name"], version=version)
    return Component(
        type=ComponentType.LIBRARY,
        name=project["name"],
        version=version,
        bom_ref=str(purl),
        purl=purl,
        description=project["description"],
        licenses=[LicenseExpression(project["license"])],
        external_references=[
            ExternalReference(
                type=ExternalReferenceType.VCS, url=XsUri(project["urls"]["Repository"])
            )
        ],
    )


def _component(pin, required):
    [version] = [each.version for each in pin.specifier]
    name = canonicalize_name(pin.name)
    purl = PackageURL("pypi", name=name, version=version)
    marker = [] if pin.marker is None else [Property(name="python:marker", value=str(pin.marker))]
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=str(purl),
        purl=purl,
        scope=ComponentScope.REQUIRED if name in required else ComponentScope.OPTIONAL,
        properties=marker,
    )


def _direct(project):
    extras = project["optional-dependencies"].values()
    return [*project["dependencies"], *(each for listed in extras for each in listed)]
