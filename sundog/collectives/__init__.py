"""Collectives with torch's meaning. One algorithm, one file."""
