"""``"forebay.contrib.django"`` in ``INSTALLED_APPS``: ``manage.py check`` then checks the settings."""

from django.apps import AppConfig
from django.core.checks import register

__all__ = ["ForebayConfig"]


class ForebayConfig(AppConfig):
    """Without models. The limits work without it, too."""

    name = "forebay.contrib.django"
    label = "forebay"
    verbose_name = "forebay"

    def ready(self) -> None:
        from forebay.contrib.django import checks

        register(checks.check_settings, "forebay")
        register(checks.check_deployment, "forebay", deploy=True)
