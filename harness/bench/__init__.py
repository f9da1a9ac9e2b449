"""Authority on speed: implementations side by side in one process, each time with its error against float64."""
