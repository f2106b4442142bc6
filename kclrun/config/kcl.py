"""The Java KCL on the lease table of an application, as far as the settings name it."""

from __future__ import annotations

from kclrun.config.schema import Settings


def kcl_application(settings: Settings) -> str:
    """The application name of Java workers: tables of KCL 3.0 to 3.4 are named by it."""
    return settings.leases.kcl_application or settings.application
