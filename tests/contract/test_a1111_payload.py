"""The payload format of the service `a1111` keeps the contract of payload formats."""

from __future__ import annotations

from tests.worker._a1111 import base64_of, payload, picture

from comfyfleet.testing.contract.payload_format import PayloadFormatContract
from comfyfleet.worker.connectors.a1111 import PLUGIN

OTHER = {"sd_model_checkpoint": "other.safetensors"}
URL = "https://example.com/x.png"


class TestA1111Format(PayloadFormatContract):
    payload_format = PLUGIN.payload
    same = (
        payload(),
        payload(prompt="a fox", seed=-1, steps=40),
        payload(width=1024, height=512, n_iter=4, cfg_scale=3.5, styles=["ink"]),
        payload(subseed=-1, subseed_strength=0.2, mask=None),
    )
    other = (
        payload(override_settings=OTHER),
        payload(sampler_name="DPM++ 2M"),
        payload(enable_hr=True, hr_upscaler="Latent"),
        payload("img2img", init_images=[base64_of(picture())]),
        payload("extra-single-image", image=base64_of(picture())),
    )
    wrong = (
        ("route", {"body": {}}),
        ("body", {"route": "txt2img"}),
        ("body.steps", payload(steps=0)),
        ("body.seed", payload(seed="random")),
        ("body.force_task_id", payload(force_task_id="mine")),
        ("body.init_images.0", payload("img2img", init_images=[URL])),
        ("body.override_settings.outdir_grids", payload(override_settings={"outdir_grids": "/"})),
    )
