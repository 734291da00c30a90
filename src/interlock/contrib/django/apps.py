"""The app. Its checks see to the settings; nothing is connected here, since a server may fork after this."""

# Django has no types of its own, and those of django-stubs are not for everyone.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownLambdaType=false
# mypy: disable-error-code="misc, no-any-return, untyped-decorator"

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig

__all__ = ["InterlockConfig"]


class InterlockConfig(AppConfig):
    """`INSTALLED_APPS = [..., "interlock.contrib.django"]`."""

    name = "interlock.contrib.django"
    label = "interlock"
    verbose_name = "Interlock"

    def ready(self) -> None:
        """Register the system checks."""
        import_module("interlock.contrib.django.checks")  # it registers what it has
