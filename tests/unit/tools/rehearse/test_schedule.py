"""The closed form of a schedule beside Megatron's own, which trains."""

from typing import Any

import pytest

from nemo_rl_mcore.tools.rehearse.schedule import Schedule

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]


class Groups:
    def __init__(self) -> None:
        self.param_groups: list[dict[str, float]] = [{}]


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_closed_form(style: str, warmup: int) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    form = Schedule(3e-3, 3e-4, style, warmup, 1e-4, 9)
    steps = 8
    groups: Any = Groups()
    scheduler = OptimizerParamScheduler(
        groups,
        init_lr=1e-4,
        max_lr=3e-3,
        min_lr=3e-4,
        lr_warmup_steps=warmup * steps,
        lr_decay_steps=9 * steps,
        lr_decay_style=style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=9 * steps,
        wd_incr_style="constant",
    )
    found: list[float] = []
    for _ in range(12):
        found.append(scheduler.get_lr(groups.param_groups[0]))
        scheduler.step(steps)
    assert found == pytest.approx([form.rate(step) for step in range(12)], rel=1e-12)
