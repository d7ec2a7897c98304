"""The run's main process, which plans the run, calls ranks, engines and environments, and records the results."""
