import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "distributed"), str(HERE.parents[1] / "benchmarks")]
