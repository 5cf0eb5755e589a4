"""How long an op should take on a machine: a model of its time, and what bounds it."""
