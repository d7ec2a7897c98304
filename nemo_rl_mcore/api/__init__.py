"""The Python interface: from arguments to a recipe, and from a recipe to a run; documented in docs/python.md."""
