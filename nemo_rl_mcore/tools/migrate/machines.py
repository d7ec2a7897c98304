"""Which GPUs train and which answer: NeMo RL takes those of engines out of the cluster, and here they are beside it."""

from nemo_rl_mcore.tools.migrate.draft import Draft

_COLOCATED = "policy.generation.colocated"
_RESOURCES = f"{_COLOCATED}.resources"
_NODES, _GPUS = "cluster.num_nodes", "cluster.gpus_per_node"


def share_out_cluster(draft: Draft) -> None:
    """Leave to the cluster what trains (algorithms/grpo.py: `train_nodes -= inference_nodes`, or GPUs of one node)."""
    if draft.get(f"{_COLOCATED}.enabled") is not False:
        _leave_out_unread(draft)
        return
    nodes = draft.number(_NODES) or 1
    key, asked = (_NODES, "num_nodes") if nodes > 1 else (_GPUS, "gpus_per_node")
    whole, engines = draft.number(key), draft.number(f"{_RESOURCES}.{asked}")
    if whole is None or engines is None or engines <= 0:
        return
    if whole <= engines:
        what = f"{engines} for engines leave none of {key}: {whole} to train on, which NeMo RL refuses too"
        draft.refuse(f"{_RESOURCES}.{asked}", engines, f"lower it below {key}", what, "too-large")
        draft.pop(f"{_RESOURCES}.{asked}")
        return
    why = f"the {engines} of {_RESOURCES}.{asked} are part of it there, and beside it here"
    draft.change(key, whole - engines, why)


def _leave_out_unread(draft: Draft) -> None:
    """Drop the engines' own GPUs where they share those of the ranks; NeMo RL reads them there no more than this."""
    for key, value in draft.section(_RESOURCES).items():
        if value is not None:
            draft.dropped.append(f"{_RESOURCES}.{key}")
    if draft.section(_RESOURCES):
        draft.pop(_RESOURCES)
