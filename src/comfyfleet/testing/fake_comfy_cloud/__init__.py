"""A fake Comfy Cloud account: the documented interfaces v2 and v1, plans, credits, faults and real small pictures.

It is held to the vendor's documentation and to a recording of the vendor's own local proxy for v2. Nobody has compared
it with the real service. It needs Pillow: `pip install 'comfyfleet[fake]'`.
"""

from comfyfleet.testing.fake_comfy_cloud.server import FakeComfyCloud
from comfyfleet.testing.fake_comfy_cloud.settings import CloudFaults, CloudStats, FakeCloudSettings

__all__ = ["CloudFaults", "CloudStats", "FakeCloudSettings", "FakeComfyCloud"]
