"""`sundog trace`: who waited for whom."""
