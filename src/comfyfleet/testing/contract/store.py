"""What every store keeps to. A store's own test module says how to make one, and nothing else."""

from __future__ import annotations

from comfyfleet.testing.contract.differential import DifferentialContract
from comfyfleet.testing.contract.documents import CabinetContract
from comfyfleet.testing.contract.fair_share import SharingContract
from comfyfleet.testing.contract.held_jobs import HoldingContract
from comfyfleet.testing.contract.leases import LeasingContract
from comfyfleet.testing.contract.races import RacingContract
from comfyfleet.testing.contract.settlement import SettlingContract
from comfyfleet.testing.contract.state import KeepingContract
from comfyfleet.testing.contract.statistics import LearningContract
from comfyfleet.testing.contract.store_bench import OnBench


class StoreContract(
    LeasingContract,
    KeepingContract,
    LearningContract,
    RacingContract,
    CabinetContract,
    HoldingContract,
    SettlingContract,
    SharingContract,
    DifferentialContract,
    OnBench,
):
    """Needs one fixture, `make_store`: an empty store under the clock it is given, not yet opened."""
