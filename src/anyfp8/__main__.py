"""python -m anyfp8: the command line."""

from anyfp8.cli import main

main()
