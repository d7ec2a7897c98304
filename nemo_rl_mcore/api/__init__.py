"""The front door in Python: from arguments to a recipe, and from a recipe to a run. docs/python.md is its page."""
