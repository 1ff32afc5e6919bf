"""The rows of the table of routes that are about webhooks: standing ones, the secret that signs, and deliveries."""

from __future__ import annotations

from comfyfleet.wire import bodies, webhooks
from comfyfleet.wire.route import CALLERS, READERS, Route, get_route, of_noun, post_route

WEBHOOKS = of_noun(
    "webhooks",
    get_route(
        "list_webhooks",
        "/api/webhooks",
        "Standing webhooks",
        READERS,
        webhooks.WebhookList,
        query=bodies.PageQuery,
    ),
    Route(
        "create_webhook",
        "POST",
        "/api/webhooks",
        "Have facts of every job that is submitted from now on delivered to a URL",
        CALLERS,
        body=webhooks.StandingBody,
        answers={201: webhooks.WebhookView},
    ),
    Route(
        "change_webhook",
        "PATCH",
        "/api/webhooks/{webhook_id}",
        "Change its URL, events or name; what is pending goes where it was to go",
        CALLERS,
        body=webhooks.WebhookChange,
        answers={200: webhooks.WebhookView},
    ),
    post_route(
        "test_webhook",
        "/api/webhooks/{webhook_id}/test",
        "Send a test delivery, signed, and say what the receiver answered; nothing is kept or tried again",
        CALLERS,
        webhooks.WebhookTested,
    ),
    Route(
        "delete_webhook",
        "DELETE",
        "/api/webhooks/{webhook_id}",
        "Deliver nothing new to it; what is pending is still tried",
        CALLERS,
        answers={204: None},
    ),
    post_route(
        "rotate_webhook_secret",
        "/api/webhook-secret",
        "Make a new secret that signs deliveries, shown once",
        CALLERS,
        webhooks.SecretMade,
        body=webhooks.SecretBody,
        is_body_optional=True,
    ),
    get_route(
        "list_deliveries",
        "/api/deliveries",
        "Deliveries of all jobs, in the order of their submission",
        READERS,
        webhooks.DeliveryList,
        query=webhooks.DeliveriesQuery,
    ),
    get_route(
        "job_deliveries",
        "/api/jobs/{job_id}/deliveries",
        "What was delivered of a job, what is tried again, what was given up",
        READERS,
        webhooks.DeliveryList,
        query=bodies.WholeQuery,
    ),
    post_route(
        "resend_delivery",
        "/api/deliveries/{delivery_id}/resend",
        "Deliver once more, at once, whatever became of it",
        CALLERS,
        webhooks.DeliveryView,
    ),
)
