"""`replay`: train again on the groups that a run has kept, and compare."""
