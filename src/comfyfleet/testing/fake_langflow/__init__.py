"""A fake LangFlow server for tests and demonstrations. Its outputs are made from the request."""

from comfyfleet.testing.fake_comfyui.clock import HandClock, ScaledClock
from comfyfleet.testing.fake_langflow.flows import FakeFlow
from comfyfleet.testing.fake_langflow.server import FakeLangFlow
from comfyfleet.testing.fake_langflow.settings import FakeLangFlowSettings, LangFlowFaults

__all__ = ["FakeFlow", "FakeLangFlow", "FakeLangFlowSettings", "HandClock", "LangFlowFaults", "ScaledClock"]
