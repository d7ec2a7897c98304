"""Play rollouts: schedule prompt groups, play their episodes, and track, log and save them."""
