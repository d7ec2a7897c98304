"""The run's Ray actors, and the Ray session that hosts them."""

import os

from nemo_rl_mcore.driver.actors.places import set_ray_import_switches

# Ray reads these variables once, on import; all modules that import Ray are in this package.
set_ray_import_switches(os.environ)
