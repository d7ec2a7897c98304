"""The command, with ranks and engines that keep journals; the arguments are its own."""

import sys
from dataclasses import replace

from journals import JournaledEngine, JournaledMegatronPolicyWorker

from nemo_rl_mcore import cli
from nemo_rl_mcore.driver import policy
from nemo_rl_mcore.driver import run as launch


def journaled_kind(config):
    return replace(engine_kind(config), engine=JournaledEngine)


if __name__ == "__main__":
    engine_kind = launch.engine_kind
    launch.engine_kind = journaled_kind
    policy.MegatronPolicyWorker = JournaledMegatronPolicyWorker
    sys.exit(cli.main())
