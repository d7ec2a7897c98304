"""PPO's critic: its last step on all ranks, and on one."""

from __future__ import annotations

from nemo_rl_mcore.tools.rehearse import tolerances
from nemo_rl_mcore.tools.rehearse.compared import (
    require_comparable_balance,
    require_movement,
    require_same_results,
    require_several_ranks,
    within,
)
from nemo_rl_mcore.tools.rehearse.one_rank import one_rank
from nemo_rl_mcore.tools.rehearse.ran import Ran


def critic_on_one_rank(ran: Ran) -> str:
    """Train the critic's last step on one rank from the checkpoint before it; compare weights, loss and gradient norm.

    Raises Refused where that cannot be compared, and Found where something differs.
    """
    require_several_ranks(ran.layout.ranks)
    require_comparable_balance(ran.config)
    plan = ran.on_one_rank().models["value"]
    with one_rank(plan.policy, role=plan.role) as one:
        after, before = one.load(ran.step(2)), one.load(ran.step(1))
        require_movement(before, after, tolerances.REORDERED)
        require_same_results(ran.critic_calls[-1], one.train(ran.critic_calls[-1]))
        return within(after, one.tensors(), tolerances.REORDERED)
