"""Rules between sections, as `config.base.Rule` objects, with a module for each subject.

MODEL_RULES apply to every model of a run, even a frozen one; POLICY_RULES to the policy and every other trained model;
ENGINE_RULES to the policy's engines. All these have paths relative to `policy`. RUN_RULES apply between the sections
of a recipe, with paths as in `RunConfig.key`. `policies.py` and `runs.py` apply the rules. Sections do not depend on
them.
"""
