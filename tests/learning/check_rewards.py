"""Fail unless a run of the copy task learned: `check_rewards.py LOG_DIR`."""

import sys
from pathlib import Path

from nemo_rl_mcore.driver.observability import read_history

FIRST_BELOW, LAST_ABOVE = 0.10, 0.95


def main(log_dir: str) -> int:
    rewards = [row["train/reward"] for row in read_history(Path(log_dir)) if "train/reward" in row]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-20:]) / 20
    learned = first < FIRST_BELOW and last > LAST_ABOVE
    sys.stdout.write(
        f"{'learned' if learned else 'DID NOT LEARN'}: reward {first:.3f} over the first 5 steps "
        f"(below {FIRST_BELOW}), {last:.3f} over the last 20 (above {LAST_ABOVE})\n"
    )
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
