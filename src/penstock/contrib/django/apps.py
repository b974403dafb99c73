"""``"penstock.contrib.django"`` in ``INSTALLED_APPS``: ``manage.py check`` then looks at the settings."""

from django.apps import AppConfig
from django.core.checks import register

__all__ = ["PenstockConfig"]


class PenstockConfig(AppConfig):
    """Has no models. The limits work without it, too."""

    name = "penstock.contrib.django"
    label = "penstock"
    verbose_name = "penstock"

    def ready(self) -> None:
        from penstock.contrib.django import checks

        register(checks.check_settings, "penstock")
        register(checks.check_deployment, "penstock", deploy=True)
