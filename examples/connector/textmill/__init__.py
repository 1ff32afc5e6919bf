"""A text service in one file, and its connector for ComfyFleet. The guide is docs/connectors.md."""
