"""Steps that train on any number of devices exactly what one device trains with the whole batch."""

import importlib
import pathlib

from ._family import NAMES as NAMES
from ._family import SLOW as SLOW
from ._family import Family as Family
from ._family import get as get
from ._family import module_of as module_of

for _path in sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py")):
    importlib.import_module(f"{__name__}.{_path.stem}")
