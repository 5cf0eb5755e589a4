"""`sundog check`: races, deadlocks and mutants on the simulator."""
