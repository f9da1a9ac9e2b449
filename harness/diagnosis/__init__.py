"""How good a diagnosis is, measured: mutants that nothing was tuned on are found, made smaller and diagnosed."""
