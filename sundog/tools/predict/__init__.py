"""`sundog predict`: how long an op should take on a described machine."""
