"""`python -m harness` is the `kda` command."""

import sys

from harness.cli import main

if __name__ == "__main__":  # processes of a crew import this module too
    sys.exit(main())
