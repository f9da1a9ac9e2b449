"""Alternative implementations of the operator, each with its verifier."""
