"""The sections value and teacher as NeMo RL writes them: a whole policy again, where ours names what may differ.

A critic and a teacher are cut as the policy is, so that each of their keys repeats one of the policy.
"""

from collections.abc import Iterator
from typing import cast

from nemo_rl_mcore.config.base import Problem, Tree, join_path, value_at
from nemo_rl_mcore.recipe.foreign.judgement import OFF, UNREAD, Judgement, refused, shown
from nemo_rl_mcore.recipe.foreign.unsupported import UNSUPPORTED, Screened

OWN_KEYS: dict[str, tuple[str, ...]] = {
    "value": ("optimizer", "scheduler", "max_grad_norm", "train_micro_batch_size"),
    "teacher": ("model", "model_name", "hf_config_overrides", "init_checkpoint", "warm_start"),
}
"""What the sections hold here."""
MOVED = ("optimizer", "scheduler")
"""Sections of value.megatron_cfg that stand in value here."""

_FROZEN = ("optimizer", "scheduler", "megatron_cfg.optimizer", "megatron_cfg.scheduler", "max_grad_norm")
_OF_VALUE: dict[str, Judgement] = {
    "reward_model_cfg": refused(OFF, remedy="remove it; the critic is the policy's model with a value head"),
    "generation": UNREAD,
}
_OF_TEACHER: dict[str, Judgement] = {
    **dict.fromkeys(_FROZEN, UNREAD),
    **{f"train_{size}_batch_size": UNREAD for size in ("global", "micro")},
    "generation_batch_size": UNREAD,
    "generation": UNREAD,
    "tokenizer": UNREAD,  # it is the policy's, or the divergence would compare different tokens
}
_JUDGED = {"value": _OF_VALUE, "teacher": _OF_TEACHER}
_CUT = (
    *("micro_batch_size", "logprob_batch_size", "dynamic_batching", "sequence_packing", "parallel"),
    *(
        "pipeline_stage",
        "activation_checkpointing",
        "recompute_",
        "distributed_data_parallel_config",
        "fused_linear",
        "_fusion",
    ),
)
"""Parts of the names of keys that say how a model is cut, and nothing of what it computes."""


def judged_as(path: str) -> str:
    """Return the key of the policy that one of a critic or a teacher repeats; the path itself for any other."""
    name, _, key = path.partition(".")
    return f"policy.{key}" if name in OWN_KEYS else path


def is_judged_alone(path: str) -> bool:
    """Return whether a key of a critic or a teacher, or a section around it, has a judgement that no policy has."""
    name, _, key = path.partition(".")
    return any(key == known or key.startswith(f"{known}.") for known in _JUDGED.get(name, ()))


def screen_second_models(tree: Tree, recipe: Tree, result: Screened) -> tuple[Tree, dict[str, str]]:
    """Leave of value and teacher what they hold here; give also which foreign key gave which of ours.

    tree: the recipe that the table has been applied to; recipe: as it was written.
    """
    origins: dict[str, str] = {}
    for name, own in OWN_KEYS.items():
        section = tree.get(name)
        if not isinstance(section, dict):
            continue
        foreign, written = _Foreign(name, own, recipe, result), cast("Tree", section)
        if foreign.differs(written):
            tree = {**tree, name: foreign.screened(written, origins)}
    return tree, origins


class _Foreign:
    """One of the two sections."""

    def __init__(self, name: str, own: tuple[str, ...], recipe: Tree, result: Screened) -> None:
        self._name, self._own, self._recipe, self._result = name, own, recipe, result

    def differs(self, section: Tree) -> bool:
        """Return whether the section has keys that stand here in the policy's alone."""
        return not section.keys() <= {*self._own} and any(
            value_at(self._recipe, f"policy.{key}") is not None or key in _JUDGED[self._name]
            for key in section
            if key not in self._own
        )

    def screened(self, section: Tree, origins: dict[str, str]) -> Tree:
        kept = {key: section[key] for key in self._own if _is_ours(key, section.get(key))}
        theirs = {key: value for key, value in section.items() if key not in kept}
        if self._name == "value":
            megatron = section.get("megatron_cfg")
            inner = cast("Tree", megatron) if isinstance(megatron, dict) else {}
            for key in MOVED:
                if isinstance(inner.get(key), dict) and key not in kept:
                    kept[key] = self._moved(key, cast("Tree", inner[key]), origins)
        for path, value, parent in self._leaves(theirs, ""):
            if not (self._name == "value" and path.startswith(_MOVED_PREFIXES)):
                self._compare(path, value, parent)
        return kept

    def _moved(self, key: str, section: Tree, origins: dict[str, str]) -> Tree:
        kept: Tree = {}
        for leaf, value in section.items():
            path = f"megatron_cfg.{key}.{leaf}"
            written = f"{self._name}.{path}"
            if not self._result.judge(written, value, section, self._recipe, f"policy.{path}"):
                kept[leaf] = value
                origins[f"{self._name}.{key}.{leaf}"] = written
        return kept

    def _leaves(self, section: Tree, prefix: str) -> Iterator[tuple[str, object, Tree]]:
        for key, value in section.items():
            path = join_path(prefix, str(key))
            known = f"policy.{path}" in UNSUPPORTED or path in _JUDGED[self._name]
            if isinstance(value, dict) and not known:
                yield from self._leaves(cast("Tree", value), path)
            else:
                yield path, value, section

    def _compare(self, path: str, value: object, section: Tree) -> None:
        """Say what a key asks for that the policy's does not."""
        written, of_policy = f"{self._name}.{path}", value_at(self._recipe, f"policy.{path}")
        judged = _JUDGED[self._name].get(path)
        if value == of_policy or value is None or (judged and judged.accepts(value, section, self._recipe)):
            self._result.dropped.append(written)
        elif judged is not None:
            self._result.problems.append(
                Problem("not-supported", written, f"{shown(value)} is not supported", judged.remedy)
            )
        elif self._result.judge(written, value, section, self._recipe, f"policy.{path}"):
            return
        elif any(part in path for part in _CUT):
            what = f"{shown(value)} has no effect here"
            cost = f"it is cut as the policy is, by policy.{path}: {shown(of_policy)}"
            self._result.warnings.append(Problem("has-no-effect", written, what, cost))
        else:
            what = f"{shown(value)} differs from policy.{path}: {shown(of_policy)}"
            self._result.problems.append(
                Problem("contradicts", written, what, "remove it, or give both the same value")
            )


_MOVED_PREFIXES = tuple(f"megatron_cfg.{key}." for key in MOVED)


def _is_ours(key: str, value: object) -> bool:
    """Return whether a key of ours holds what it holds here: PyTorch's optimizers and schedules have the same names."""
    if key not in MOVED:
        return value is not None
    return isinstance(value, dict) and "name" not in value
