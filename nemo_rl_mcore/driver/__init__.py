"""The process that a run is started in: it plans, asks ranks, engines and environments, and records."""
