"""What a payload of A1111 is to the hub: valid or refused with the field's name, its identity, needs, seeds, places."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker._a1111 import base64_of, payload, picture

from comfyfleet.model.payload import PayloadAmounts, PayloadReading
from comfyfleet.model.workflow_graph import InvalidWorkflow
from comfyfleet.worker.connectors.a1111 import PLUGIN

FORMAT = PLUGIN.payload


def read(route: str = "txt2img", **body: Any) -> PayloadReading:
    return FORMAT.read(payload(route, **body))


def refusal(value: Any) -> str:
    with pytest.raises(InvalidWorkflow) as caught:
        FORMAT.read(value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "field", "cause"),
    [
        ({}, "route", "it is missing"),
        ({"route": "txt2video", "body": {}}, "route", "'txt2video' is no route"),
        ({"route": "txt2img"}, "body", "it is missing"),
        ({"route": "txt2img", "body": []}, "body", "it is not an object"),
        ({"route": "txt2img", "body": {}, "prompt": "x"}, "prompt", "it is not known"),
        (payload(steps=0), "body.steps", "0 is not a whole number from 1 on"),
        (payload(width="512"), "body.width", "'512' is not a whole number from 1 on"),
        (payload(batch_size=True), "body.batch_size", "True is not a whole number"),
        (payload(seed=-2), "body.seed", "-2 is not a seed"),
        (payload(seed=1.5), "body.seed", "1.5 is not a seed"),
        (payload(prompt=["x"]), "body.prompt", "it is not a text"),
        (payload(enable_hr=True, hr_scale="2"), "body.hr_scale", "it is not a number"),
        (payload(force_task_id="mine"), "body.force_task_id", "ComfyFleet sets it"),
        (payload(infotext="x\nModel: other"), "body.infotext", "which ComfyFleet cannot read"),
        (payload(send_images=False), "body.send_images", "ComfyFleet needs it to be true"),
        (payload(batch_size=20, n_iter=20), "body.n_iter", "it asks for 400 pictures"),
        (payload(override_settings=[]), "body.override_settings", "it is not an object"),
        (
            payload(override_settings={"outdir_samples": "/etc"}),
            "body.override_settings.outdir_samples",
            "where the server writes files",
        ),
        (
            payload(override_settings={"samples_filename_pattern": "x"}),
            "body.override_settings.samples_filename_pattern",
            "where the server writes files",
        ),
        (
            payload(override_settings={"sd_model_checkpoint": 7}),
            "body.override_settings.sd_model_checkpoint",
            "it is not a text",
        ),
        (payload(alwayson_scripts={"controlnet": []}), "body.alwayson_scripts", "not an object of objects"),
        (
            payload(alwayson_scripts={str(n): {"args": [{}] * 99} for n in range(101)}),
            "body.alwayson_scripts",
            "more than 10000 scripts and arguments",
        ),
        (payload("img2img", init_images="abc"), "body.init_images", "its form is wrong"),
        (payload("extra-batch-images", imageList=["abc"]), "body.imageList", "its form is wrong"),
        (payload("img2img", init_images=["http://x/y.png"]), "body.init_images.0", "it is a URL"),
        (payload("img2img", mask=" HTTPS://x/y.png"), "body.mask", "it is a URL"),
        (
            payload(alwayson_scripts={"controlnet": {"args": [{"image": "http://169.254.169.254/"}]}}),
            "body.alwayson_scripts.controlnet.args.0.image",
            "it is a URL",
        ),
    ],
)
def test_a_wrong_payload_is_refused_with_its_field_and_cause(value: Any, field: str, cause: str) -> None:
    words = refusal(value)
    assert words.startswith(f"The field {field!r} of an A1111 payload is not valid: ") and cause in words
    # The next step comes last.
    assert words.endswith(".") and words.count(". ") >= 1


def test_a_payload_that_is_no_json_is_refused() -> None:
    assert "not JSON" in refusal(payload(cfg_scale=float("nan")))


def test_what_the_servers_own_page_shows_as_an_example_is_accepted() -> None:
    body: dict[str, Any] = {
        "send_images": True,
        "save_images": False,
        "force_task_id": None,
        "styles": None,
        "cfg_scale": 7,
    }
    assert read(**body).payload["body"]["cfg_scale"] == 7


def test_a_prompt_may_say_anything() -> None:
    assert read(prompt="https://example.com is a sign on a wall").models == frozenset()


def test_needs_are_the_names_that_a_server_offers() -> None:
    found = read(
        prompt="a cat <lora:ink:0.8> and <lora:sub\\fog:1:2>",
        negative_prompt="<lora:not-loaded-here:1>",
        override_settings={
            "sd_model_checkpoint": "xl\\base.safetensors [aaaa]",
            "sd_vae": "VAE\\plain.safetensors",
            "forge_additional_modules": ["/models/text_encoder/t5.safetensors"],
        },
        refiner_checkpoint="refiner",
        sampler_name="DPM++ 2M",
        scheduler="Karras",
        script_name="Prompt Matrix",
        alwayson_scripts={"ControlNet": {"args": []}},
        enable_hr=True,
        hr_upscaler="4x-plain",
        hr_checkpoint_name="Use same checkpoint",
        hr_sampler_name="Use same sampler",
    )
    assert found.models == {
        "xl/base.safetensors [aaaa]",
        "vae/plain.safetensors",
        "module/t5.safetensors",
        "refiner",
        "lora/ink",
        "lora/sub/fog",
        "upscaler/4x-plain",
    }
    assert found.node_classes == {
        "sampler/DPM++ 2M",
        "scheduler/karras",
        "script/txt2img/prompt matrix",
        "script/txt2img/controlnet",
    }


def test_choices_that_mean_none_are_no_needs() -> None:
    found = read(
        override_settings={"sd_vae": "Automatic"},
        disable_extra_networks=True,
        prompt="<lora:ink:1>",
        hr_upscaler="4x-plain",
    )
    assert found.models == frozenset()
    upscaled = read("extra-single-image", image=base64_of(picture()), upscaler_1="Lanczos", upscaler_2="None")
    assert upscaled.models == {"upscaler/Lanczos"} and not upscaled.node_classes


def test_a_run_without_a_seed_asks_for_one_so_that_a_retry_makes_the_same_picture() -> None:
    found = FORMAT.read({"route": "txt2img", "body": {"prompt": "x"}})
    assert (found.seeds, found.payload["body"]["seed"]) == (("body.seed",), -1)
    assert read(seed=5).seeds == ()
    assert read(seed=-1, subseed=-1).seeds == ("body.seed", "body.subseed")
    assert read(seed=5, subseed_strength=0.3).seeds == ("body.subseed",)
    assert read("extra-single-image").seeds == ()


def places(route: str = "txt2img", **body: Any) -> list[str]:
    return sorted(read(route, **body).inputs or ())


def test_files_of_the_hub_have_their_places() -> None:
    assert places() == []
    assert places("img2img") == ["body.init_images", "body.mask"]
    assert places("extra-single-image") == ["body.image"]
    assert places("extra-batch-images") == ["body.imageList"]
    assert places(alwayson_scripts={"controlnet": {"args": [{"module": "canny"}]}}) == [
        "body.alwayson_scripts.controlnet.args.0.image",
        "body.alwayson_scripts.controlnet.args.0.mask",
    ]


@pytest.mark.parametrize(
    ("body", "amounts"),
    [
        ({}, PayloadAmounts(3, 512 * 512, 1)),
        ({"steps": 40, "width": 1024, "batch_size": 4, "n_iter": 9}, PayloadAmounts(40, 1024 * 512, 4)),
        ({"enable_hr": True}, PayloadAmounts(3, 1024 * 1024, 1)),
        (
            {"enable_hr": True, "hr_scale": 1.5, "hr_resize_x": 2048, "hr_second_pass_steps": 9},
            PayloadAmounts(9, 2048 * 768, 1),
        ),
        ({"enable_hr": False, "hr_scale": 8}, PayloadAmounts(3, 512 * 512, 1)),
        ({"script_name": "x/y/z plot"}, None),
    ],
    ids=str,
)
def test_what_a_payload_asks_for_can_be_limited(body: dict[str, Any], amounts: PayloadAmounts | None) -> None:
    assert read(**body).amounts == amounts
    assert read("extra-single-image").amounts is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"script_name": "x/y/z plot", "script_args": [7, "other.safetensors"]}, "body.script_name"),
        ({"styles": ["inky"]}, "body.styles"),
        (
            {"alwayson_scripts": {"controlnet": {"args": [{"model": "c"}]}}},
            "body.alwayson_scripts.controlnet",
        ),
        ({"alwayson_scripts": {"refiner": {"args": [True, 3]}}}, "body.alwayson_scripts.refiner"),
        ({"override_settings": {"sd_lora": "other"}}, "body.override_settings.sd_lora"),
        ({"override_settings": {"sd_unet": ["other"]}}, "body.override_settings.sd_unet"),
        ({"prompt": "a <hypernet:other:1>"}, "body.prompt"),
        ({"hr_prompt": "a <lyco:other>"}, "body.hr_prompt"),
        ({"ip_adapter": [{"adapter": "other"}]}, "body.ip_adapter"),
    ],
    ids=str,
)
def test_a_field_that_may_name_a_model_unseen_is_told(body: dict[str, Any], field: str) -> None:
    assert read(**body).unread == (field,)


def test_what_names_no_model_or_is_read_is_not_told() -> None:
    plain: dict[str, Any] = {
        "prompt": "a <lora:ink:1> hat",
        "override_settings": {"sd_model_checkpoint": "x", "sd_vae": "y", "CLIP_stop_at_last_layers": 2},
        "alwayson_scripts": {"soft inpainting": {"args": []}},
        "styles": [],
        "script_name": "",
        "tiling": True,
        "cfg_scale": 7.5,
    }
    assert read(**plain).unread == ()
    picture_text = base64_of(picture())
    assert read("img2img", **plain, init_images=[picture_text], mask=picture_text).unread == ()
    assert read("extra-batch-images", imageList=[{"data": picture_text, "name": "a"}]).unread == ()


@pytest.mark.parametrize("text", ["<lora:", "<lora:a", "<hypernet:", "<"])
def test_a_prompt_of_megabytes_without_an_end_is_read_at_once(text: str) -> None:
    began = time.process_time()
    reading = read(prompt="<lora:ink:1>" + text * 200_000, hr_prompt=text * 200_000)
    assert reading.models == {"lora/ink"}
    # Minutes, if each beginning were searched to the end.
    assert time.process_time() - began < 10


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=20),
        "negative_prompt": st.text(st.characters(codec="utf-8"), max_size=20),
        "seed": st.integers(-1, 2**53),
        "steps": st.integers(1, 150),
        "width": st.integers(8, 4096),
        "n_iter": st.integers(1, 8),
        "cfg_scale": st.floats(1, 30),
        "tiling": st.booleans(),
    },
)


@given(VALUES)
def test_values_do_not_change_the_identity(values: dict[str, Any]) -> None:
    assert read(**values).workflow_hash == read().workflow_hash


@pytest.mark.parametrize(
    "other",
    [
        {"override_settings": {"sd_model_checkpoint": "other"}},
        {"prompt": "a lighthouse <lora:ink:1>"},
        {"sampler_name": "DPM++ 2M"},
        {"scheduler": "Karras"},
        {"script_name": "x"},
        {"enable_hr": True},
        {"override_settings": {"CLIP_stop_at_last_layers": 2}},
    ],
    ids=str,
)
def test_models_samplers_scripts_and_passes_change_the_identity(other: dict[str, Any]) -> None:
    assert read(**other).workflow_hash != read().workflow_hash


def test_routes_have_their_own_identity() -> None:
    routes = ("txt2img", "img2img", "extra-single-image", "extra-batch-images")
    assert len({FORMAT.read({"route": route, "body": {}}).workflow_hash for route in routes}) == 4


def test_the_payload_of_the_caller_is_not_changed() -> None:
    given = {"route": "txt2img", "body": {"prompt": "x", "mask": None}}
    before = msgspec.json.encode(given)
    FORMAT.read(given)
    assert msgspec.json.encode(given) == before


def test_the_schema_names_every_route_and_is_json() -> None:
    schema = FORMAT.json_schema()
    assert schema["properties"]["route"]["enum"] == [
        "txt2img",
        "img2img",
        "extra-single-image",
        "extra-batch-images",
    ]
    assert msgspec.json.decode(msgspec.json.encode(schema)) == schema
