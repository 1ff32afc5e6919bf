"""What every store keeps to. A store's own test module says how to make one, and nothing else."""

from __future__ import annotations

from comfyfleet.contract.bench import OnBench
from comfyfleet.contract.cabinet import CabinetContract
from comfyfleet.contract.differential import DifferentialContract
from comfyfleet.contract.holding import HoldingContract
from comfyfleet.contract.keeping import KeepingContract
from comfyfleet.contract.learning import LearningContract
from comfyfleet.contract.leasing import LeasingContract
from comfyfleet.contract.racing import RacingContract
from comfyfleet.contract.settling import SettlingContract
from comfyfleet.contract.sharing import SharingContract


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
