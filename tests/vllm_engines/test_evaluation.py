"""An evaluation by vLLM gives the greedy answers of one by the training ranks."""

import json
from pathlib import Path

from nemo_rl_mcore.tools.check.given_weights import as_evaluated, load_over_given_weights
from nemo_rl_mcore.tools.evaluate.evaluate import run_eval

RECIPE = Path(__file__).parents[2] / "examples/configs/grpo_copy_vllm_cpu.yaml"


def test_greedy_answers_of_vllm_and_embedded_are_equal(tmp_path, capsys):
    rows = [{"input": f"{number}>", "output": str(number)} for number in range(100, 1000, 60)]
    (tmp_path / "digits.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"defaults: {RECIPE}\n"
        "policy: {max_total_sequence_length: 32, generation: {max_new_tokens: 16},\n"
        "  model: {init_method_std: 0.3, max_position_embeddings: 64}}\n"
        "eval: {sets: {digits: {data_path: digits.jsonl}}}\n"
    )
    found = []
    for backend in ("embedded", "vllm"):
        overrides = [f"policy.generation.backend={backend}", f"logger.log_dir={tmp_path / backend}"]
        assert run_eval(as_evaluated(load_over_given_weights(overrides, config=str(recipe)))) == 0
        found.append(
            {
                name: (tmp_path / backend / "eval" / name).read_text()
                for name in ("digits.jsonl", "results.json")
            }
        )
    assert found[0] == found[1]
    responses = {json.loads(line)["response"] for line in found[0]["digits.jsonl"].splitlines()}
    assert len(responses) > 5
    assert "engine and training agree on 4 rows" in capsys.readouterr().out
