"""`python -m harness.detection` writes docs/detection.md and the record of smallest sizes anew."""

from harness import interpreter
from harness.detection.page import write

interpreter.install()
write()
