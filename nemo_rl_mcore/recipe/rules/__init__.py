"""Rules between sections: rows of `config.base.Rule`, a file for each subject.

MODEL_RULES hold of every model of a run, one that is only read included; POLICY_RULES of the policy, and of every model
that is trained as one is; ENGINE_RULES of the policy's engines; their paths are relative to `policy`. RUN_RULES hold
between the sections of a recipe, whose paths are those of `RunConfig.key`. `policies.py` and `runs.py` apply them.
Sections know nothing of these rules.
"""
