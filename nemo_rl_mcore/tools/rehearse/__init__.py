"""Rehearsal: a shrunk recipe, run on CPU in its own layout, and proofs about it."""
