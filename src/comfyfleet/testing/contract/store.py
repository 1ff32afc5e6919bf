"""The whole store contract. A store's test module only provides the fixture that makes the store."""

from __future__ import annotations

from comfyfleet.testing.contract.differential import DifferentialContract
from comfyfleet.testing.contract.documents import DocumentStoreContract
from comfyfleet.testing.contract.fair_share import FairShareContract
from comfyfleet.testing.contract.held_jobs import HeldJobContract
from comfyfleet.testing.contract.leases import LeaseContract
from comfyfleet.testing.contract.load_times import LoadTimesContract
from comfyfleet.testing.contract.races import RaceContract
from comfyfleet.testing.contract.settlement import SettlementContract
from comfyfleet.testing.contract.state import StateContract
from comfyfleet.testing.contract.statistics import StatisticsContract
from comfyfleet.testing.contract.store_bench import UsesBench
from comfyfleet.testing.contract.waiting_lanes import WaitingLanesContract


class StoreContract(
    LeaseContract,
    StateContract,
    StatisticsContract,
    RaceContract,
    DocumentStoreContract,
    HeldJobContract,
    SettlementContract,
    FairShareContract,
    LoadTimesContract,
    WaitingLanesContract,
    DifferentialContract,
    UsesBench,
):
    """Needs one fixture, `make_store`: an empty store with the given clock, not yet opened."""
