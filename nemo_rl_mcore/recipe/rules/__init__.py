"""Rules between sections, a file for each feature.

A rule is a function that yields the problems of a model's policy section, or of a whole recipe, and is named in the
RULES of its file, which `policies.py` or `runs.py` has. Sections know nothing of these rules.
"""
