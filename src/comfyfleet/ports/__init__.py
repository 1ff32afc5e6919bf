"""The interfaces of the architecture as protocols, without implementations.

Workers use `WorkerApi`. The engine decides with `policy/` and writes to a `Store`, whose `Records` hold the tenant's
side. A `Bus` publishes facts. A `Connector` drives one kind of service. `Clock` and
`RandomSource` are the only sources of time and randomness.
"""

from __future__ import annotations

from comfyfleet.ports.bus import Bus as Bus
from comfyfleet.ports.bus import PeerChannel as PeerChannel
from comfyfleet.ports.bus import Subscription as Subscription
from comfyfleet.ports.connector import Connector as Connector
from comfyfleet.ports.connector import ConnectorPlugin as ConnectorPlugin
from comfyfleet.ports.connector import Inventory as Inventory
from comfyfleet.ports.connector import OutputSource as OutputSource
from comfyfleet.ports.documents import Document as Document
from comfyfleet.ports.documents import DocumentStore as DocumentStore
from comfyfleet.ports.files import FileStore as FileStore
from comfyfleet.ports.queue import Counts as Counts
from comfyfleet.ports.queue import DirectWorkerInbox as DirectWorkerInbox
from comfyfleet.ports.queue import EligibilityMatrix as EligibilityMatrix
from comfyfleet.ports.queue import FairShare as FairShare
from comfyfleet.ports.queue import JobTransfer as JobTransfer
from comfyfleet.ports.queue import LaneBacklog as LaneBacklog
from comfyfleet.ports.queue import LeaseState as LeaseState
from comfyfleet.ports.queue import Peek as Peek
from comfyfleet.ports.queue import QueuePlace as QueuePlace
from comfyfleet.ports.queue import QueueReader as QueueReader
from comfyfleet.ports.queue import Store as Store
from comfyfleet.ports.queue import TransferableStore as TransferableStore
from comfyfleet.ports.records import RecordQuery as RecordQuery
from comfyfleet.ports.records import Records as Records
from comfyfleet.ports.system import Clock as Clock
from comfyfleet.ports.system import RandomSource as RandomSource
from comfyfleet.ports.system import Timer as Timer
from comfyfleet.ports.worker_api import InputSource as InputSource
from comfyfleet.ports.worker_api import NodeCatalogReceiver as NodeCatalogReceiver
from comfyfleet.ports.worker_api import OutputReceiver as OutputReceiver
from comfyfleet.ports.worker_api import WorkerApi as WorkerApi
