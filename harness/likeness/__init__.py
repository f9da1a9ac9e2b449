"""What a failure looks like: probes ask a route the same questions, and the answers are held to those of mutants."""
