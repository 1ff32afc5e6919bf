"""ComfyUI's own node classes, as far as the fake knows them.

Only declarations: names, types, ranges and choices are those of the real classes, so that validation refuses what a
real server refuses. What each one does is in `behaviours`.
"""

from __future__ import annotations

from typing import Any

from comfyfleet.testing.fake_comfyui.catalogue import INPUT_IMAGES, NodeClass, choice, combo, files, input_of

_SAVES: dict[str, str] = {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"}
_PREFIX_TIP = (
    "The prefix for the file to save. This may include formatting information such as %date:yyyy-MM-dd% or "
    "%Empty Latent Image.width% to include values from nodes."
)
SAMPLERS = (
    "euler", "euler_cfg_pp", "euler_ancestral", "euler_ancestral_cfg_pp", "heun", "heunpp2", "exp_heun_2_x0",
    "exp_heun_2_x0_sde", "dpm_2", "dpm_2_ancestral", "lms", "dpm_fast", "dpm_adaptive", "dpmpp_2s_ancestral",
    "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde", "dpmpp_sde_gpu", "dpmpp_2m", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde",
    "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde", "dpmpp_3m_sde_gpu", "ddpm",
    "lcm", "ipndm", "ipndm_v", "deis", "res_multistep", "res_multistep_cfg_pp", "res_multistep_ancestral",
    "res_multistep_ancestral_cfg_pp", "gradient_estimation", "gradient_estimation_cfg_pp", "er_sde", "seeds_2",
    "seeds_3", "sa_solver", "sa_solver_pece", "ddim", "uni_pc", "uni_pc_bh2",
)  # fmt: skip
NEWER_SAMPLERS = ("exp_heun_2_x0", "exp_heun_2_x0_sde")
SCHEDULERS = (
    "simple", "sgm_uniform", "karras", "exponential", "ddim_uniform", "beta", "normal", "linear_quadratic",
    "kl_optimal",
)  # fmt: skip
_CLIP_TYPES = (
    "stable_diffusion", "stable_cascade", "sd3", "stable_audio", "mochi", "ltxv", "pixart", "cosmos", "lumina2",
    "wan", "hidream", "chroma", "ace", "omnigen2", "qwen_image", "hunyuan_image", "flux2", "ovis",
)  # fmt: skip


def _image_nodes() -> list[NodeClass]:
    pixels: dict[str, Any] = {"default": 512, "min": 1, "max": 16384, "step": 1}
    scaled: dict[str, Any] = {"default": 512, "min": 0, "max": 16384, "step": 1}
    return [
        NodeClass(
            name="EmptyImage",
            required={
                "width": input_of("INT", **pixels),
                "height": input_of("INT", **pixels),
                "batch_size": input_of("INT", default=1, min=1, max=4096),
                "color": input_of("INT", default=0, min=0, max=0xFFFFFF, step=1, display="color"),
            },
            outputs=("IMAGE",),
            behaviour="empty_image",
        ),
        NodeClass(
            name="ImageInvert",
            display_name="Invert Image",
            required={"image": input_of("IMAGE")},
            outputs=("IMAGE",),
            behaviour="invert",
        ),
        NodeClass(
            name="ImageScale",
            display_name="Upscale Image",
            required={
                "image": input_of("IMAGE"),
                "upscale_method": choice("nearest-exact", "bilinear", "area", "bicubic", "lanczos"),
                "width": input_of("INT", **scaled),
                "height": input_of("INT", **scaled),
                "crop": choice("disabled", "center"),
            },
            outputs=("IMAGE",),
            category="image/upscaling",
            behaviour="scale",
        ),
        NodeClass(
            name="LoadImage",
            display_name="Load Image",
            required={"image": files(INPUT_IMAGES, image_upload=True)},
            outputs=("IMAGE", "MASK"),
            behaviour="load_image",
        ),
        NodeClass(
            name="SaveImage",
            display_name="Save Image",
            description="Saves the input images to your ComfyUI output directory.",
            required={
                "images": input_of("IMAGE", tooltip="The images to save."),
                "filename_prefix": input_of("STRING", default="ComfyUI", tooltip=_PREFIX_TIP),
            },
            hidden=_SAVES,
            output_node=True,
            behaviour="save_image",
        ),
        NodeClass(
            name="PreviewImage",
            display_name="Preview Image",
            description="Saves the input images to your ComfyUI output directory.",
            required={"images": input_of("IMAGE")},
            hidden=_SAVES,
            output_node=True,
            behaviour="preview_image",
        ),
        NodeClass(
            name="SaveImageWebsocket",
            required={"images": input_of("IMAGE")},
            category="api/image",
            python_module="custom_nodes.websocket_image_save",
            output_node=True,
            behaviour="save_image_websocket",
            always_runs=True,
        ),
    ]


def _model_nodes() -> list[NodeClass]:
    return [
        NodeClass(
            name="CheckpointLoaderSimple",
            display_name="Load Checkpoint",
            description="Loads a diffusion model checkpoint, diffusion models are used to denoise latents.",
            required={
                "ckpt_name": files("checkpoints", tooltip="The name of the checkpoint (model) to load."),
            },
            outputs=("MODEL", "CLIP", "VAE"),
            output_tooltips=(
                "The model used for denoising latents.",
                "The CLIP model used for encoding text prompts.",
                "The VAE model used for encoding and decoding images to and from latent space.",
            ),
            category="loaders",
            behaviour="load_model",
        ),
        NodeClass(
            name="UNETLoader",
            display_name="Load Diffusion Model",
            required={
                "unet_name": files("diffusion_models"),
                "weight_dtype": choice("default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"),
            },
            outputs=("MODEL",),
            category="advanced/loaders",
            behaviour="load_model",
        ),
        NodeClass(
            name="VAELoader",
            display_name="Load VAE",
            required={"vae_name": files("vae")},
            outputs=("VAE",),
            category="loaders",
            behaviour="load_model",
        ),
        NodeClass(
            name="CLIPLoader",
            display_name="Load CLIP",
            required={"clip_name": files("text_encoders"), "type": choice(*_CLIP_TYPES)},
            optional={"device": choice("default", "cpu", advanced=True)},
            outputs=("CLIP",),
            category="advanced/loaders",
            behaviour="load_model",
        ),
        NodeClass(
            name="LoraLoader",
            display_name="Load LoRA",
            description="LoRAs are used to modify diffusion and CLIP models.",
            required={
                "model": input_of("MODEL", tooltip="The diffusion model the LoRA will be applied to."),
                "clip": input_of("CLIP", tooltip="The CLIP model the LoRA will be applied to."),
                "lora_name": files("loras", tooltip="The name of the LoRA."),
                "strength_model": input_of("FLOAT", default=1.0, min=-100.0, max=100.0, step=0.01),
                "strength_clip": input_of("FLOAT", default=1.0, min=-100.0, max=100.0, step=0.01),
            },
            outputs=("MODEL", "CLIP"),
            output_tooltips=("The modified diffusion model.", "The modified CLIP model."),
            category="loaders",
            behaviour="apply_lora",
        ),
        NodeClass(
            name="CLIPTextEncode",
            display_name="CLIP Text Encode (Prompt)",
            required={
                "text": input_of(
                    "STRING", multiline=True, dynamicPrompts=True, tooltip="The text to be encoded."
                ),
                "clip": input_of("CLIP", tooltip="The CLIP model used for encoding the text."),
            },
            outputs=("CONDITIONING",),
            category="conditioning",
            behaviour="encode_text",
            cost_s=0.1,
            uses_gpu=True,
        ),
    ]


def _latent_nodes() -> list[NodeClass]:
    edge: dict[str, Any] = {"default": 512, "min": 16, "max": 16384, "step": 8}
    return [
        NodeClass(
            name="EmptyLatentImage",
            display_name="Empty Latent Image",
            description="Create a new batch of empty latent images to be denoised via sampling.",
            required={
                "width": input_of("INT", **edge, tooltip="The width of the latent images in pixels."),
                "height": input_of("INT", **edge, tooltip="The height of the latent images in pixels."),
                "batch_size": input_of("INT", default=1, min=1, max=4096),
            },
            outputs=("LATENT",),
            category="latent",
            behaviour="empty_latent",
        ),
        NodeClass(
            name="KSampler",
            description="Uses the provided model, positive and negative conditioning to denoise the latent image.",
            required={
                "model": input_of("MODEL", tooltip="The model used for denoising the input latent."),
                "seed": input_of(
                    "INT", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, control_after_generate=True
                ),
                "steps": input_of("INT", default=20, min=1, max=10000),
                "cfg": input_of("FLOAT", default=8.0, min=0.0, max=100.0, step=0.1, round=0.01),
                "sampler_name": choice(*SAMPLERS),
                "scheduler": choice(*SCHEDULERS),
                "positive": input_of("CONDITIONING"),
                "negative": input_of("CONDITIONING"),
                "latent_image": input_of("LATENT", tooltip="The latent image to denoise."),
                "denoise": input_of("FLOAT", default=1.0, min=0.0, max=1.0, step=0.01),
            },
            outputs=("LATENT",),
            output_tooltips=("The denoised latent.",),
            category="sampling",
            behaviour="sample",
            uses_gpu=True,
        ),
        NodeClass(
            name="VAEDecode",
            display_name="VAE Decode",
            description="Decodes latent images back into pixel space images.",
            required={
                "samples": input_of("LATENT", tooltip="The latent to be decoded."),
                "vae": input_of("VAE", tooltip="The VAE model used for decoding the latent."),
            },
            outputs=("IMAGE",),
            output_tooltips=("The decoded image.",),
            category="latent",
            behaviour="decode",
            cost_s=0.5,
            uses_gpu=True,
        ),
        NodeClass(
            name="VAEEncode",
            display_name="VAE Encode",
            required={"pixels": input_of("IMAGE"), "vae": input_of("VAE")},
            outputs=("LATENT",),
            category="latent",
            behaviour="encode_image",
            cost_s=0.3,
            uses_gpu=True,
        ),
        NodeClass(
            name="SaveLatent",
            required={
                "samples": input_of("LATENT"),
                "filename_prefix": input_of("STRING", default="latents/ComfyUI"),
            },
            hidden=_SAVES,
            category="_for_testing",
            output_node=True,
            behaviour="save_latent",
        ),
    ]


def _media_nodes() -> list[NodeClass]:
    return [
        NodeClass(
            name="SaveAnimatedWEBP",
            required={
                "images": input_of("IMAGE"),
                "filename_prefix": input_of("STRING", default="ComfyUI"),
                "fps": input_of("FLOAT", default=6.0, min=0.01, max=1000.0, step=0.01),
                "lossless": input_of("BOOLEAN", default=True),
                "quality": input_of("INT", default=80, min=0, max=100),
                "method": combo("default", "fastest", "slowest"),
            },
            hidden=_SAVES,
            category="image/animation",
            python_module="comfy_extras.nodes_images",
            output_node=True,
            behaviour="save_animation",
        ),
        NodeClass(
            name="CreateVideo",
            display_name="Create Video",
            description="Create a video from images.",
            required={
                "images": input_of("IMAGE", tooltip="The images to create a video from."),
                "fps": input_of("FLOAT", default=30.0, min=1.0, max=120.0, step=1.0),
            },
            optional={"audio": input_of("AUDIO", tooltip="The audio to add to the video.")},
            outputs=("VIDEO",),
            category="image/video",
            python_module="comfy_extras.nodes_video",
            behaviour="create_video",
        ),
        NodeClass(
            name="SaveVideo",
            display_name="Save Video",
            description="Saves the input images to your ComfyUI output directory.",
            required={
                "video": input_of("VIDEO", tooltip="The video to save."),
                "filename_prefix": input_of("STRING", default="video/ComfyUI", tooltip=_PREFIX_TIP),
                "format": combo("auto", "mp4", default="auto"),
                "codec": combo("auto", "h264", default="auto"),
            },
            hidden=_SAVES,
            category="image/video",
            python_module="comfy_extras.nodes_video",
            output_node=True,
            behaviour="save_video",
        ),
        NodeClass(
            name="EmptyAudio",
            display_name="Empty Audio",
            required={
                "duration": input_of("FLOAT", default=60.0, min=0.0, max=0xFFFFFFFFFFFFFFFF, step=0.01),
                "sample_rate": input_of("INT", default=44100, min=1, max=192000),
                "channels": input_of("INT", default=2, min=1, max=2),
            },
            outputs=("AUDIO",),
            category="audio",
            python_module="comfy_extras.nodes_audio",
            behaviour="empty_audio",
        ),
        NodeClass(
            name="SaveAudio",
            display_name="Save Audio (FLAC)",
            required={
                "audio": input_of("AUDIO"),
                "filename_prefix": input_of("STRING", default="audio/ComfyUI"),
            },
            hidden=_SAVES,
            category="audio",
            python_module="comfy_extras.nodes_audio",
            output_node=True,
            behaviour="save_audio",
        ),
        NodeClass(
            name="PreviewAny",
            display_name="Preview as Text",
            required={"source": input_of("*")},
            category="utils",
            python_module="comfy_extras.nodes_preview_any",
            output_node=True,
            behaviour="preview_text",
        ),
    ]


def core_node_classes() -> list[NodeClass]:
    """The classes every ComfyUI has."""
    return [*_image_nodes(), *_model_nodes(), *_latent_nodes(), *_media_nodes()]
