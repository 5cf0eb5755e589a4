"""Does any rank still run? Ranks that are processes find out by words in shared memory.

A rank counts how often it began to run, and how often it looked at all that it waits for and found
no change. If every rank is idle and each has looked once more, from beginning to end, while nobody
ran in between, then nobody can run any more: none of them missed what another did last.
"""

from __future__ import annotations

import mmap

import numpy as np

__all__ = ["NBYTES", "Quiet"]

NBYTES = mmap.PAGESIZE  # at the end of each rank's shared memory
_STARTS, _LOOKS, _IDLE = range(3)


class Quiet:
    """The words of all ranks, of which this rank writes its own."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.share([], 0)

    def share(self, memories: list[mmap.mmap], end: int) -> None:
        """From here on it is about the ranks with these memories; the words lie at their end."""
        words = [np.frombuffer(m, np.int64, 3, end + -end % 8) for m in memories]
        self._ranks = words
        self._mine = words[self._rank] if words else np.zeros(3, np.int64)
        self._seen: list[list[int]] = []  # the words of all ranks, when all had become idle

    def runs(self) -> None:
        """Before this rank does anything that another one could notice."""
        self._mine[_IDLE] = 0
        self._mine[_STARTS] += 1
        self._seen = []

    def is_everywhere(self) -> bool:
        """Call after each look at what this rank waits for, if it found no change."""
        self._mine[_LOOKS] += 1
        self._mine[_IDLE] = 1
        now = [words.tolist() for words in self._ranks]
        if not all(words[_IDLE] for words in now):
            self._seen = []
        elif [w[_STARTS] for w in self._seen] != [w[_STARTS] for w in now]:
            self._seen = now
        else:
            pairs = zip(self._seen, now, strict=True)
            return all(new[_LOOKS] >= old[_LOOKS] + 2 for old, new in pairs)
        return False
