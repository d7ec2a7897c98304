"""Ray actors around the policy, and the session they live in."""

import os

from nemo_rl_mcore.driver.actors.places import set_ray_import_switches

# Ray reads these once, when it is imported; every module that imports Ray lives below this package.
set_ray_import_switches(os.environ)
