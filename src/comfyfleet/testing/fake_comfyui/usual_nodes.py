"""More of ComfyUI's node classes, for common workflows with control, upscaling and newer models.

Only declarations. Most use the generic behaviour: they take time, load their models and pass on values of the
right type. Classes with their own behaviour are in `core_nodes`.
"""

from __future__ import annotations

from typing import Any

from comfyfleet.testing.fake_comfyui.catalogue import NodeClass, choice, combo, files, input_of
from comfyfleet.testing.fake_comfyui.core_nodes import SAMPLERS, SCHEDULERS

_EDGE: dict[str, Any] = {"default": 1024, "min": 16, "max": 16384, "step": 8}
_SCALED: dict[str, Any] = {"default": 512, "min": 0, "max": 16384, "step": 8}
_METHODS = ("nearest-exact", "bilinear", "area", "bicubic", "bislerp")


def _loaders() -> list[NodeClass]:
    return [
        NodeClass(
            name="LoraLoaderModelOnly",
            required={
                "model": input_of("MODEL"),
                "lora_name": files("loras"),
                "strength_model": input_of("FLOAT", default=1.0, min=-100.0, max=100.0, step=0.01),
            },
            outputs=("MODEL",),
            category="loaders",
            behaviour="apply_lora",
        ),
        NodeClass(
            name="DualCLIPLoader",
            required={
                "clip_name1": files("text_encoders"),
                "clip_name2": files("text_encoders"),
                "type": choice("sdxl", "sd3", "flux", "hunyuan_video", "hidream"),
            },
            outputs=("CLIP",),
            category="advanced/loaders",
            behaviour="load_model",
        ),
        NodeClass(
            name="ControlNetLoader",
            display_name="Load ControlNet Model",
            required={"control_net_name": files("controlnet")},
            outputs=("CONTROL_NET",),
            category="loaders",
            behaviour="load_model",
        ),
        NodeClass(
            name="CLIPVisionLoader",
            display_name="Load CLIP Vision",
            required={"clip_name": files("clip_vision")},
            outputs=("CLIP_VISION",),
            category="loaders",
            behaviour="load_model",
        ),
        NodeClass(
            name="UpscaleModelLoader",
            display_name="Load Upscale Model",
            required={"model_name": files("upscale_models")},
            outputs=("UPSCALE_MODEL",),
            category="loaders",
            python_module="comfy_extras.nodes_upscale_model",
            behaviour="load_model",
        ),
    ]


def _conditioning() -> list[NodeClass]:
    share = input_of("FLOAT", default=0.0, min=0.0, max=1.0, step=0.001)
    return [
        NodeClass(
            name="CLIPSetLastLayer",
            display_name="CLIP Set Last Layer",
            required={
                "clip": input_of("CLIP"),
                "stop_at_clip_layer": input_of("INT", default=-1, min=-24, max=-1, step=1),
            },
            outputs=("CLIP",),
            category="conditioning",
        ),
        NodeClass(
            name="ConditioningCombine",
            display_name="Conditioning (Combine)",
            required={"conditioning_1": input_of("CONDITIONING"), "conditioning_2": input_of("CONDITIONING")},
            outputs=("CONDITIONING",),
            category="conditioning",
        ),
        NodeClass(
            name="ConditioningZeroOut",
            required={"conditioning": input_of("CONDITIONING")},
            outputs=("CONDITIONING",),
            category="advanced/conditioning",
        ),
        NodeClass(
            name="FluxGuidance",
            required={
                "conditioning": input_of("CONDITIONING"),
                "guidance": input_of("FLOAT", default=3.5, min=0.0, max=100.0, step=0.1),
            },
            outputs=("CONDITIONING",),
            category="advanced/conditioning/flux",
            python_module="comfy_extras.nodes_flux",
        ),
        NodeClass(
            name="ControlNetApplyAdvanced",
            display_name="Apply ControlNet",
            required={
                "positive": input_of("CONDITIONING"),
                "negative": input_of("CONDITIONING"),
                "control_net": input_of("CONTROL_NET"),
                "image": input_of("IMAGE"),
                "strength": input_of("FLOAT", default=1.0, min=0.0, max=10.0, step=0.01),
                "start_percent": share,
                "end_percent": share,
            },
            optional={"vae": input_of("VAE")},
            outputs=("CONDITIONING", "CONDITIONING"),
            category="conditioning/controlnet",
            uses_gpu=True,
        ),
    ]


def _latents() -> list[NodeClass]:
    seed = input_of("INT", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, control_after_generate=True)
    return [
        NodeClass(
            name="EmptySD3LatentImage",
            required={
                "width": input_of("INT", **_EDGE),
                "height": input_of("INT", **_EDGE),
                "batch_size": input_of("INT", default=1, min=1, max=4096),
            },
            outputs=("LATENT",),
            category="latent/sd3",
            python_module="comfy_extras.nodes_sd3",
            behaviour="empty_latent",
        ),
        NodeClass(
            name="LatentUpscale",
            display_name="Upscale Latent",
            required={
                "samples": input_of("LATENT"),
                "upscale_method": choice(*_METHODS),
                "width": input_of("INT", **_SCALED),
                "height": input_of("INT", **_SCALED),
                "crop": choice("disabled", "center"),
            },
            outputs=("LATENT",),
            category="latent",
            behaviour="scale_latent",
        ),
        NodeClass(
            name="KSamplerSelect",
            required={"sampler_name": combo(*SAMPLERS)},
            outputs=("SAMPLER",),
            category="sampling/custom_sampling/samplers",
            python_module="comfy_extras.nodes_custom_sampler",
        ),
        NodeClass(
            name="KSamplerAdvanced",
            display_name="KSampler (Advanced)",
            required={
                "model": input_of("MODEL"),
                "add_noise": choice("enable", "disable"),
                "noise_seed": seed,
                "steps": input_of("INT", default=20, min=1, max=10000),
                "cfg": input_of("FLOAT", default=8.0, min=0.0, max=100.0, step=0.1, round=0.01),
                "sampler_name": choice(*SAMPLERS),
                "scheduler": choice(*SCHEDULERS),
                "positive": input_of("CONDITIONING"),
                "negative": input_of("CONDITIONING"),
                "latent_image": input_of("LATENT"),
                "start_at_step": input_of("INT", default=0, min=0, max=10000),
                "end_at_step": input_of("INT", default=10000, min=0, max=10000),
                "return_with_leftover_noise": choice("disable", "enable"),
            },
            outputs=("LATENT",),
            category="sampling",
            behaviour="sample",
            uses_gpu=True,
        ),
    ]


def _images() -> list[NodeClass]:
    return [
        NodeClass(
            name="ImageScaleBy",
            display_name="Upscale Image By",
            required={
                "image": input_of("IMAGE"),
                "upscale_method": choice("nearest-exact", "bilinear", "area", "bicubic", "lanczos"),
                "scale_by": input_of("FLOAT", default=1.0, min=0.01, max=8.0, step=0.01),
            },
            outputs=("IMAGE",),
            category="image/upscaling",
            behaviour="scale",
        ),
        NodeClass(
            name="ImageScaleToTotalPixels",
            required={
                "image": input_of("IMAGE"),
                "upscale_method": combo("nearest-exact", "bilinear", "area", "bicubic", "lanczos"),
                "megapixels": input_of("FLOAT", default=1.0, min=0.01, max=16.0, step=0.01),
                "resolution_steps": input_of("INT", default=1, min=1, max=256),
            },
            outputs=("IMAGE",),
            category="image/upscaling",
            python_module="comfy_extras.nodes_post_processing",
            behaviour="scale_to_pixels",
        ),
        NodeClass(
            name="ImageUpscaleWithModel",
            display_name="Upscale Image (using Model)",
            required={"upscale_model": input_of("UPSCALE_MODEL"), "image": input_of("IMAGE")},
            outputs=("IMAGE",),
            category="image/upscaling",
            python_module="comfy_extras.nodes_upscale_model",
            cost_s=2.0,
            uses_gpu=True,
        ),
    ]


def usual_node_classes() -> list[NodeClass]:
    """The classes beside the core ones."""
    return [*_loaders(), *_conditioning(), *_latents(), *_images()]
