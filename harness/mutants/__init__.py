"""Faults put into copies of our own sources, each of which the harness must find: the measure of what it can see."""

from harness.mutants.campaign import campaign
from harness.mutants.catalogue import MUTANTS
from harness.mutants.mutant import Mutant, Patch, Trial

__all__ = ["MUTANTS", "Mutant", "Patch", "Trial", "campaign"]
