"""Evaluation: answers to named sets of prompts, saved sample by sample, and their metrics."""
