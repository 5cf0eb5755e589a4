"""`sundog predict`: what an op should take on machines that are described."""
