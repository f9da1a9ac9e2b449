"""Authority on report folders: one finding, one folder that a kernel author opens, reads and runs."""
