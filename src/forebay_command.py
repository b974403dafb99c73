"""The entry of the ``forebay`` command, outside the package, which takes a while to import."""

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command. An interrupt before that ends it as one during its work: with 130, and without a traceback."""
    try:
        from forebay.cli import main as run
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    run()
