"""The models of a run: what each of them is, and where the recipe sets what it does not share with the policy."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from nemo_rl_mcore.config.base import Problem
from nemo_rl_mcore.config.policy import PolicyConfig

_POLICY_KEY = re.compile(r"\bpolicy(\.\w+)+")


class Role(Enum):
    """What the model of a worker is for: to say how probable tokens are, or how much is to be expected of a state."""

    POLICY = "policy"
    VALUE = "value"


@dataclass(frozen=True)
class ModelPlan:
    """One model of a run; it has ranks of its own.

    name: its section of the recipe and, if it is trained, its folder in a checkpoint.
    policy: the configuration of its workers, which has met the rules of a policy (those that concern a frozen one).
    reference: whether the weights of the start are kept beside it.
    warm_start: the recipe that is run first for its weights, where they are not those of the run's own warm start.
    own_keys: keys of the policy that the recipe sets elsewhere for this model, and where.
    """

    name: str
    policy: PolicyConfig
    role: Role = Role.POLICY
    trained: bool = True
    reference: bool = False
    warm_start: str | None = None
    own_keys: Mapping[str, str] = field(default_factory=dict[str, str])

    def key(self, path: str) -> str:
        """Where the recipe sets for this model what `path`, such as policy.precision, is for the policy."""
        for shared, own in self.own_keys.items():
            if path == shared or path.startswith(f"{shared}."):
                return own + path.removeprefix(shared)
        return path

    def in_recipe(self, problem: Problem) -> Problem:
        """A problem of this model's configuration, told by the keys that the user finds in the recipe."""
        return replace(
            problem,
            path=self.key(problem.path),
            what=self._in_recipe(problem.what),
            remedy=self._in_recipe(problem.remedy),
            related=tuple(self.key(path) for path in problem.related),
        )

    def _in_recipe(self, text: str) -> str:
        return _POLICY_KEY.sub(lambda match: self.key(match.group()), text)
