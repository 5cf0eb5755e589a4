"""Timing: `sundog bench`."""
