"""Authority on the truth about KDA: float64 and mpmath references, and what rounding may change. Knows no kernel."""

from oracle.operator import Options, evaluate, evaluate_gate
from oracle.rounding import EXACT, RandomGrids, Rounding, ToFormat

__all__ = ["EXACT", "Options", "RandomGrids", "Rounding", "ToFormat", "evaluate", "evaluate_gate"]
