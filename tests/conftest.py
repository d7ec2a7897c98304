import os
import sys
from pathlib import Path

# Before torch is imported. On some CPUs a matrix product by several threads does not give the same bits twice, and a
# backward pass that computes logits again must find those of its forward pass. Ranks have one thread each as well.
os.environ["OMP_NUM_THREADS"] = "1"

sys.path.insert(0, str(Path(__file__).parent))
