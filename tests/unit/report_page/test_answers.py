import gzip

from run_folder import rows, write_run
from written_samples import sample

from nemo_rl_mcore.config.logger import RolloutsConfig
from nemo_rl_mcore.observability import RolloutSink
from nemo_rl_mcore.report_page.answers import some_of, steps_shown


def test_steps_are_spread_over_the_run(tmp_path):
    shown, unread = steps_shown(write_run(tmp_path, rows(100)))
    assert [one["step"] for one in shown] == [1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100]
    assert {one["kind"] for one in shown} == {"training"}
    assert unread == []


def test_validations_stand_behind_training(tmp_path):
    sink = RolloutSink(tmp_path, RolloutsConfig(), None, print)
    sink.add([sample(5), sample(5, of_validation=True)])
    sink.log(5, {})
    assert [(one["kind"], one["total"]) for one in steps_shown(tmp_path)[0]] == [
        ("training", 1),
        ("validation", 1),
    ]


def test_answers_with_tokens_stay_then_the_lowest_and_the_highest():
    answers = [{"number": number, "reward": float(number % 50), "tokens": None} for number in range(100)]
    for number in (40, 41):
        answers[number]["tokens"] = {"text": ["a"]}
    chosen = [answer["number"] for answer in some_of(answers)]
    assert len(chosen) == 24
    assert chosen == sorted(chosen)
    assert {40, 41, 0, 50, 49, 99} <= {*chosen}
    rewards = sorted(answers[number]["reward"] for number in chosen if number not in (40, 41))
    assert rewards == [*sorted([0.0, 1, 2, 3, 4] * 2 + [5.0]), *sorted([45.0, 46, 47, 48, 49] * 2 + [44.0])]


def test_a_reward_that_is_not_finite_is_none_and_no_trouble():
    assert some_of([{"reward": None}, {"reward": 1.0}]) == [{"reward": None}, {"reward": 1.0}]


def test_long_texts_are_cut_and_say_so(tmp_path):
    write_run(tmp_path, rows(1), response="x" * 30_000)
    [step], _ = steps_shown(tmp_path)
    response = step["answers"][0]["response"]
    assert len(response) < 20_100
    assert response.endswith("x… (10000 more characters)")


def test_a_damaged_file_is_named_and_the_others_are_shown(tmp_path):
    write_run(tmp_path, rows(3))
    path = tmp_path / "rollouts/step_2.jsonl.gz"
    path.write_bytes(path.read_bytes()[:40])
    (tmp_path / "rollouts/step_3.jsonl.gz").write_bytes(gzip.compress(b"{\n"))
    shown, unread = steps_shown(tmp_path)
    assert [one["step"] for one in shown] == [1]
    assert ["step_2" in unread[0], "step_3" in unread[1]] == [True, True]
