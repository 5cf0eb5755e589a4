"""`sundog calibrate`: measure the description of the machine at hand."""
