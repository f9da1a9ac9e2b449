"""`python -m harness` is the `kda` command."""

import sys

from harness.cli import main

sys.exit(main())
