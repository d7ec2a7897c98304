"""Commands; only `cli/` and `api/` import them, when they are called."""
