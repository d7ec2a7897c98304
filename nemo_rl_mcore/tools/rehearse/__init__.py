"""Rehearsals: shrunk recipes, run on CPU in their own layouts, and proofs about these runs."""
