"""The run's main process, which plans, calls ranks, engines and environments, and records."""
