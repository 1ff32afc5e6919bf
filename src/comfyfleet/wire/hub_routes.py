"""The rows of the table of routes that are about the hub itself: whether it serves, figures, a page, this protocol."""

from __future__ import annotations

from typing import Any

from comfyfleet.wire import answers
from comfyfleet.wire.route import ANYBODY, LOOKERS, READERS, Route, get_route, of_noun

HUB = of_noun(
    "hub",
    Route(
        "health",
        "GET",
        "/health",
        "Whether the hub serves",
        ANYBODY,
        aliases=("/health/ready",),
        answers={200: answers.HealthBody, 503: answers.HealthBody},
    ),
    get_route("live", "/health/live", "Whether the process lives", ANYBODY, answers.HealthBody),
    get_route("metrics", "/metrics", "Figures in the text format of Prometheus", LOOKERS, str),
    Route(
        "status_page",
        "GET",
        "/",
        "The fleet on a page for people",
        READERS,
        answers={200: None},
        takes_token=True,
        is_page=True,
    ),
    get_route("openapi", "/openapi.json", "This protocol as OpenAPI 3.1", ANYBODY, dict[str, Any]),
)
