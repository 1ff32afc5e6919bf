"""`comfyfleet`, but a claim on a tenant that moves lapses soon: what a killed hub had begun, another takes up
within the time of a test."""

from __future__ import annotations

from comfyfleet.cli.main import main
from comfyfleet.tenancy import claims

claims.CLAIM_S = 5.0

if __name__ == "__main__":
    main()
