"""Files that a command will write: whether they can be is told before it works, not after."""

from __future__ import annotations

import os

__all__ = ["check_writable"]


def check_writable(*paths: str) -> None:
    """Make their folders; a ValueError if one of the files could not be written."""
    for path in filter(None, paths):
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            _try(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def _try(path: str) -> None:
    """Open it and leave it as it was. A pipe is not tried: its reader would see the end of it."""
    existed = os.path.exists(path)
    if existed and not os.path.isfile(path) and not os.path.isdir(path):
        return
    with open(path, "ab"):
        pass
    if not existed:
        os.remove(path)
