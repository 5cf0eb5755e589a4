"""Whether a base can be written, in words, before an hour is spent on measuring for it."""

from __future__ import annotations

import os

from .append import AppendFile
from .rowtext import header
from .schema import file_names

__all__ = ["check_base", "why"]


def check_base(base: str) -> str | None:
    """None, or the sentence that says why rows cannot be appended to `<base>.csv`."""
    for path, first in zip(file_names(base), (header(), "", ""), strict=True):
        existed = os.path.exists(path)
        file = AppendFile(path, first)
        try:
            with file.locked() as fd:
                file.check_locked(fd)
                # Another writer may have made it meanwhile: only an empty file is ours.
                if not existed and os.fstat(fd).st_size == 0:
                    os.unlink(path)
        except (OSError, ValueError) as error:
            return why(path, error)
        finally:
            file.close()
    return None


def why(path: str, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{path} cannot be written: {error.strerror or error}"
    return str(error)
