"""Rehearsal: a recipe, shrunk, really run on CPU in its own layout, and what that proves of it."""
