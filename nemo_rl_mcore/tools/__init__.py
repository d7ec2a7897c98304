"""Commands that are run on demand; only the front doors import them."""
