"""Authority on selecting by name: a glob, or several with commas between them."""

import fnmatch


def matches(name: str, globs: str) -> bool:
    """Whether one of the globs in `a*,b?c` is that of the name."""
    return any(fnmatch.fnmatch(name, glob) for glob in each(globs))


def each(globs: str) -> list[str]:
    """The globs themselves."""
    return [glob.strip() for glob in globs.split(",")]
