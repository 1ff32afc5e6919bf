"""The architecture on one page: every seam of the product as a protocol, and no implementation.

Two doors in (`JobApi`, `WorkerApi`), one place to decide (the engine with `policy/`), one door to write (`Store`, with
`Records` for the tenant's side), facts out (`Bus`). A `Connector` speaks to one kind of service; a `Clock` and `Chance`
are the only sources of time and randomness.
"""

from __future__ import annotations

from comfyfleet.ports.bus import Bus as Bus
from comfyfleet.ports.bus import Relay as Relay
from comfyfleet.ports.bus import Subscription as Subscription
from comfyfleet.ports.connector import Connector as Connector
from comfyfleet.ports.connector import Inventory as Inventory
from comfyfleet.ports.connector import OutputSource as OutputSource
from comfyfleet.ports.documents import Cabinet as Cabinet
from comfyfleet.ports.documents import Document as Document
from comfyfleet.ports.files import Assets as Assets
from comfyfleet.ports.job_api import JobApi as JobApi
from comfyfleet.ports.queue import Counts as Counts
from comfyfleet.ports.queue import ForeignWorkers as ForeignWorkers
from comfyfleet.ports.queue import LeaseState as LeaseState
from comfyfleet.ports.queue import Movable as Movable
from comfyfleet.ports.queue import Moving as Moving
from comfyfleet.ports.queue import Peek as Peek
from comfyfleet.ports.queue import Shares as Shares
from comfyfleet.ports.queue import Store as Store
from comfyfleet.ports.queue import Table as Table
from comfyfleet.ports.records import Records as Records
from comfyfleet.ports.system import Chance as Chance
from comfyfleet.ports.system import Clock as Clock
from comfyfleet.ports.system import Timer as Timer
from comfyfleet.ports.worker_api import InputSource as InputSource
from comfyfleet.ports.worker_api import NodeKeeper as NodeKeeper
from comfyfleet.ports.worker_api import OutputKeeper as OutputKeeper
from comfyfleet.ports.worker_api import WorkerApi as WorkerApi
