"""Authority on subjects in a folder, NAME@FOLDER: packages that are imported from there, not from what is installed."""

import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path


def split(name: str) -> tuple[str, Path | None]:
    """(the subject's own name, the folder that it is to be imported from or None). ValueError if there is no such
    folder.
    """
    bare, at, folder = name.partition("@")
    if not at:
        return name, None
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise ValueError(f"subject is {name!r}; {folder!r} must be a folder that holds its package")
    return bare, path


def prefer(folder: Path, package: str) -> None:
    """Import from that folder first, from now on. ValueError if `package` is already imported from elsewhere, or is not
    in the folder.
    """
    if not any((folder / name).exists() for name in (package, f"{package}.py")):
        raise ValueError(f"the folder {folder} holds no package {package}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    module = sys.modules.get(package)
    where = None if module is None else _place(module)
    if where is not None and not where.is_relative_to(folder):
        raise ValueError(f"{package} is imported from {where} already; one process cannot have that of {folder} too")


def _place(module: object) -> Path | None:
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    return Path(path).resolve() if path else None


def version(folder: Path, distribution: str = "") -> str:
    """That of a distribution installed into the folder; else the commit of a checkout, with a plus if it was changed;
    else "source".
    """
    installed = [one.version for one in metadata.distributions(path=[str(folder)]) if one.name == distribution]
    if installed:
        return installed[0]
    asked = ["git", "-C", str(folder), "describe", "--always", "--dirty=+"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "source"
    return said or "source"
