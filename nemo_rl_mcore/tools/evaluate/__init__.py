"""Evaluation: answers to named sets of prompts, on disk sample by sample, and their metrics."""
