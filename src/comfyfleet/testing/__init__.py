"""Stand-ins for a fleet: a fake ComfyUI server and what is built on it.

Nothing here is needed to run a real fleet. Import `comfyfleet.testing.fake_comfyui` for the server.
"""
