"""From YAML and overrides to a `RunConfig`: reading, filling in defaults, and rules between sections."""
