"""Test helpers: a fake ComfyUI server, the store contract and a manual clock. Real fleets use none of it."""
