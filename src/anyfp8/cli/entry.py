"""From the process to a verb and back: log level, errors in four lines, exit status."""

from __future__ import annotations

import logging
import os
import sys

from anyfp8 import env
from anyfp8.cli.verbs import app
from anyfp8.errors import AnyFp8Error, EnvError, InputError, MissingPackage
from anyfp8.tools import console


def main() -> None:
    """Entry point: run a verb; a user's error is four lines on stderr, never a traceback."""
    try:
        level = env.text("ANYFP8_LOG") or "warning"
        logging.basicConfig(level=level.upper(), format="%(levelname)s: %(message)s")
        # by name: `python -m anyfp8` and test runners would be named otherwise
        app(prog_name="anyfp8")
    except AnyFp8Error as error:
        _tell(error)
        usage = isinstance(error, (InputError, EnvError)) and not isinstance(error, MissingPackage)
        sys.exit(2 if usage else 1)
    except ValueError as error:
        if "Unknown level" not in str(error):
            raise
        _tell(
            EnvError(
                "cannot read the environment variable ANYFP8_LOG",
                got=os.environ.get("ANYFP8_LOG", ""),
                want="debug, info, warning or error",
                hint="unset ANYFP8_LOG, or set it to one of these",
            )
        )
        sys.exit(2)
    except BrokenPipeError:
        # the reader of a pipe left: not our problem, and no traceback either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        console.talk("\nstopped")
        sys.exit(130)


def _tell(error: AnyFp8Error) -> None:
    console.talk(f"error: {error.what}")
    for label, text in (("  got", error.got), ("  want", error.want), ("hint", error.hint)):
        if text:
            console.talk(f"{label}: {text}")
    for name, reason in getattr(error, "reasons", {}).items():
        if error.got != f"it {reason}":
            console.talk(f"  {name} was refused because it {reason}")
