"""Measures sundog itself and makes docs/measured.md. Not part of the package that is installed."""
