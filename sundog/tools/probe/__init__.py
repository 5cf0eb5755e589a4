"""`sundog probe`: capture and replay."""
