"""`python -m nemo_rl_mcore` is the command `nemo-rl-mcore`."""

import sys

from nemo_rl_mcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
