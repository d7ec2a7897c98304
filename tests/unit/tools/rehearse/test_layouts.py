"""The layouts of a rehearsal: what a recipe shares is shared in one of them, on as many ranks as there are."""

from pathlib import Path

import pytest
import torch
from rehearsals import with_layout

from nemo_rl_mcore.tools.rehearse.proofs import Refused, Twins, critic_on_one_rank
from nemo_rl_mcore.tools.rehearse.runs import Ran
from nemo_rl_mcore.tools.rehearse.shrink import Sharing, layouts_of

SHARED = ("tensor", "pipeline", "context", "expert")


def test_a_run_on_one_rank_is_not_compared_with_itself(tmp_path: Path) -> None:
    ran = Ran({}, Sharing(), tmp_path)
    for proof in (Twins(ran).layout, lambda: critic_on_one_rank(ran)):
        with pytest.raises(Refused):
            proof()


def test_the_split_step_on_one_rank_is_that_rank_s_alone(tmp_path: Path) -> None:
    twins = Twins(Ran({}, Sharing(), tmp_path))
    trained = {"weight": torch.ones(2)}
    of_one_rank = {
        "saved 1": {"weight": torch.zeros(2)},
        "saved 2": trained,
        "train": trained,
        "split": trained,
    }
    twins.__dict__["_plain"] = of_one_rank  # what is computed once
    assert twins.split()


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ({}, 4, [Sharing()]),
        ({"world": 8}, 4, [Sharing(data=2)]),
        ({"world": 8, "tensor": 4, "sequence": True}, 4, [Sharing(data=2, tensor=2, sequence=True)]),
        ({"world": 4, "tensor": 4}, 4, [Sharing(tensor=2)]),
        (
            {"world": 8, "pipeline": 4, "virtual": 3},
            4,
            [Sharing(data=2, pipeline=2, virtual=2)],
        ),
        ({"world": 16, "tensor": 2, "pipeline": 4}, 4, [Sharing(tensor=2, pipeline=2)]),
        ({"world": 16, "tensor": 2, "pipeline": 4}, 8, [Sharing(data=2, tensor=2, pipeline=2)]),
        (
            {"world": 16, "tensor": 2, "pipeline": 4, "context": 2},
            4,
            [Sharing(tensor=2, pipeline=2), Sharing(context=2)],
        ),
        ({"world": 16, "expert": 8}, 4, [Sharing(data=2, expert=2)]),
        ({"world": 16, "pipeline": 2, "expert": 8}, 4, [Sharing(data=2, pipeline=2, expert=2)]),
        ({"world": 16, "tensor": 2, "expert": 8}, 4, [Sharing(data=2, tensor=2, expert=2)]),
    ],
)
def test_layouts(given: dict[str, int], ranks: int, expected: list[Sharing], tmp_path: Path) -> None:
    assert layouts_of(with_layout(**given), ranks) == expected


@pytest.mark.parametrize("ranks", [4, 8])
def test_whatever_is_shared_is_shared_by_two_somewhere(ranks: int) -> None:
    for number in range(16):
        sizes = {name: 2 for place, name in enumerate(SHARED) if number >> place & 1}
        found = layouts_of(with_layout(world=16, **sizes), ranks)
        for name in SHARED:
            assert max(getattr(one, name) for one in found) == sizes.get(name, 1), (sizes, found)
        assert all(one.ranks <= ranks for one in found)
        assert all((one.ranks // one.pipeline) % one.expert == 0 for one in found)
