"""From YAML and overrides to a `RunConfig`, with file and line: reading, filling in, and the rules between sections."""
