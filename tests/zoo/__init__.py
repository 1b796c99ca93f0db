"""Programs: train steps of every kind, and what one device computes for several.

`get(name)` is a program of the table (`NAMES`), `SCRIPTS` has whole training scripts, `CORE` names the steps
with which each option is tried. `check` trains a program in a `Setting` and compares with one device.
"""

import importlib
import pathlib

from jzero._compare import TOLERANCES
from jzero._compare import to_host as to_host
from jzero.testing import Tolerance as Tolerance

from ._compare import NUM_STEPS as NUM_STEPS
from ._compare import Training as Training
from ._compare import assert_trees_close as assert_trees_close
from ._compare import check as check
from ._compare import configured as configured
from ._compare import differences as differences
from ._compare import reference as reference
from ._compare import train as train
from ._compare import train_alone as train_alone
from ._compare import train_on as train_on
from ._compare import verdict as verdict
from ._program import NAMES as NAMES
from ._program import SLOW as SLOW
from ._program import Program as Program
from ._program import get as get
from ._program import module_of as module_of
from ._program import on_shards as on_shards
from ._script import SCRIPTS as SCRIPTS
from ._setting import Setting as Setting
from ._setting import applies as applies
from ._setting import sharded as sharded

# Sums over the batch are taken in another order on n devices. Set once; a program with another one
# says why. The one that jzero.testing has for float32, here for all dtypes.
FP32 = TOLERANCES["float32"]

for _path in sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py")):
    importlib.import_module(f"{__name__}.{_path.stem}")

from .core import CORE as CORE  # noqa: E402
