"""Faults of a file system, one at a time: at each operation of a save, an export, an import or a restore.

`faults.c` counts operations in a process of its own, and lets the n-th of them fail, or be its last.
"""

from ._buckets import BUCKET_SCENARIOS as BUCKET_SCENARIOS
from ._buckets import LEASE as LEASE
from ._buckets import Place as Place
from ._buckets import another_machine as another_machine
from ._buckets import begun_step as begun_step
from ._buckets import place as place
from ._buckets import stopped_beyond_its_lease as stopped_beyond_its_lease
from ._children import Child as Child
from ._children import Children as Children
from ._children import Ended as Ended
from ._library import ACTIONS as ACTIONS
from ._library import CHANGES as CHANGES
from ._library import READS as READS
from ._library import Fault as Fault
from ._library import Operation as Operation
from ._library import read_log as read_log
from ._library import why_not as why_not
from ._requests import Proxy as Proxy
from ._requests import Request as Request
from ._requests import RequestFault as RequestFault
from ._requests import faults_at as faults_at
from ._scenarios import SAVED as SAVED
from ._scenarios import SAVES as SAVES
from ._scenarios import SCENARIOS as SCENARIOS
from ._scenarios import Outcome as Outcome
from ._scenarios import Run as Run
from ._scenarios import Scenario as Scenario
from ._scenarios import judge_steps as judge_steps
