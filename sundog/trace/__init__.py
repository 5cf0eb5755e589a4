"""Who waited for whom: what the trace points of a kernel recorded (device/trace.py), read back."""

from __future__ import annotations

from .record import Raw, Recording, record_call
from .subject import Subject
from .timeline import Summary, Timeline, summarise

__all__ = ["Raw", "Recording", "Subject", "Summary", "Timeline", "record_call", "summarise"]
