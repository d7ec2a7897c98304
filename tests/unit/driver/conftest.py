import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / room) for room in ("", "algorithms", "rollouts")]
