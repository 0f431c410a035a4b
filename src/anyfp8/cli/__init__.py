"""anyfp8 VERB: the command line. Thin: every verb imports its work when it is called.

Data goes to stdout, talk to stderr; `--json` prints one document instead. Exit status 0 is fine, 1
found a problem, 2 is wrong usage.
"""

from anyfp8.cli.entry import main
from anyfp8.cli.verbs import app

__all__ = ["app", "main"]
