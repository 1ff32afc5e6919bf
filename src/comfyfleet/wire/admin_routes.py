"""The rows of the table of routes that are about files: announced by a key or a lease, moved by signed links.

The rows of the table of routes that are about keys, enrolment and the audit log.

The rows of the table of routes that are about the hub itself: whether it serves, figures, a page, this protocol.

The rows of the table of routes that are about tenants and their money.

The rows of the table of routes that are about webhooks: standing ones, the secret that signs, and deliveries.
"""

from __future__ import annotations

from typing import Any

from comfyfleet.model.access import Role
from comfyfleet.model.errors import RefusalCode
from comfyfleet.wire import answers, bodies, files, keys, tenants, webhooks
from comfyfleet.wire import credits as money
from comfyfleet.wire.route import (
    ADMIN,
    ANYBODY,
    CALLERS,
    LISTED_BYTES,
    LOOKERS,
    OPERATORS,
    READERS,
    WORKERS,
    Route,
    get_route,
    of_noun,
    post_route,
)

FILES = of_noun(
    "files",
    Route(
        "create_file",
        "POST",
        "/api/files",
        "Announce a file; the answer has a link to PUT it to. As a form (`curl -F file=@x.png`): send it whole",
        CALLERS,
        body=files.FileBody,
        takes_form=True,
        answers={201: files.FileView},
        refuses=(RefusalCode.NOT_FOUND, RefusalCode.TOO_LARGE),
    ),
    get_route(
        "list_files",
        "/api/files",
        "List files, the oldest first",
        READERS,
        files.FileList,
        query=files.FilesQuery,
    ),
    Route(
        "delete_file",
        "DELETE",
        "/api/files/{file_id}",
        "Delete a file with its thumbnails; refused while a job that has not ended needs it",
        CALLERS,
        answers={204: None},
        refuses=(RefusalCode.WRONG_PHASE,),
    ),
    get_route(
        "get_file", "/api/files/{file_id}", "What is known of a file, with a link", READERS, files.FileDetails
    ),
    get_route(
        "list_derived",
        "/api/files/{file_id}/derived",
        "What was made from a file, the oldest first",
        READERS,
        files.FileList,
        query=bodies.PageQuery,
    ),
    get_route(
        "get_thumbnail",
        "/api/files/{file_id}/thumbnail",
        "A small picture of a picture: a file of its own, with a link",
        READERS,
        files.FileView,
        query=files.ThumbnailQuery,
        refuses=(RefusalCode.INVALID_REQUEST, RefusalCode.TOO_LARGE, RefusalCode.WRONG_PHASE),
    ),
    post_route(
        "complete_file",
        "/api/files/{file_id}/complete",
        "Say that a file is whole; it is compared with what was announced",
        CALLERS,
        files.FileView,
        refuses=(RefusalCode.INVALID_REQUEST, RefusalCode.WRONG_PHASE),
    ),
    post_route(
        "part_links",
        "/api/files/{file_id}/parts",
        "Links to PUT parts of a large file to, each bound to its SHA-256",
        CALLERS,
        files.PartGrants,
        body=files.PartsBody,
        max_bytes=LISTED_BYTES,
        refuses=(RefusalCode.INVALID_REQUEST, RefusalCode.WRONG_PHASE),
    ),
    Route(
        "put_content",
        "PUT",
        "/api/files/{file_id}/content",
        "The bytes of a file, by its link",
        ANYBODY,
        query=files.LinkQuery,
        takes_bytes=True,
        answers={200: files.FileView},
        refuses=(RefusalCode.UNAUTHENTICATED, RefusalCode.TOO_LARGE, RefusalCode.WRONG_PHASE),
    ),
    Route(
        "get_content",
        "GET",
        "/api/files/{file_id}/content",
        "The bytes of a file, by its link; ranges are served",
        ANYBODY,
        query=files.LinkQuery,
        answers={200: bytes, 206: bytes, 304: None, 416: None},
        refuses=(RefusalCode.UNAUTHENTICATED,),
    ),
    post_route(
        "worker_grants",
        "/api/worker/grants",
        "Links to PUT to what a run left, asked for with its lease",
        WORKERS,
        files.FileGrants,
        body=files.GrantsBody,
        max_bytes=LISTED_BYTES,
        refuses=(RefusalCode.LEASE_LOST, RefusalCode.NOT_FOUND),
    ),
    post_route(
        "worker_parts",
        "/api/worker/parts",
        "Links to PUT parts of a large file that a run left to, asked for with its lease",
        WORKERS,
        files.PartGrants,
        body=files.WorkerPartsBody,
        max_bytes=LISTED_BYTES,
        refuses=(RefusalCode.LEASE_LOST, RefusalCode.NOT_FOUND, RefusalCode.WRONG_PHASE),
    ),
)


_PHASE = (RefusalCode.WRONG_PHASE,)

KEYS = of_noun(
    "keys",
    get_route(
        "list_keys", "/api/keys", "Every key, without its secret", ADMIN, keys.KeyList, query=bodies.PageQuery
    ),
    Route(
        "create_key",
        "POST",
        "/api/keys",
        "Make a key; it is shown once",
        ADMIN,
        body=keys.KeyBody,
        answers={201: keys.CreatedKey},
    ),
    Route(
        "revoke_key", "DELETE", "/api/keys/{key_id}", "End a key at once", ADMIN, answers={200: keys.KeyView}
    ),
    post_route(
        "rotate_key",
        "/api/keys/{key_id}/rotate",
        "Give a key a new secret, shown once",
        ADMIN,
        keys.CreatedKey,
        refuses=_PHASE,
        body=keys.RotateBody,
        is_body_optional=True,
    ),
    get_route(
        "list_enrolments",
        "/api/enrolments",
        "Every enrolment token, without its secret",
        OPERATORS,
        keys.EnrolmentList,
        query=bodies.PageQuery,
    ),
    Route(
        "create_enrolment",
        "POST",
        "/api/enrolments",
        "Make a token with which workers fetch keys of their own",
        OPERATORS,
        body=keys.EnrolmentBody,
        is_body_optional=True,
        answers={201: keys.CreatedEnrolment},
    ),
    Route(
        "revoke_enrolment",
        "DELETE",
        "/api/enrolments/{token_id}",
        "End an enrolment token at once; keys that it gave stay",
        OPERATORS,
        answers={204: None},
    ),
    post_route(
        "worker_rotate",
        "/api/worker/rotate",
        "Give the key this is called with a new secret, shown once",
        WORKERS,
        keys.CreatedKey,
        refuses=(*_PHASE, RefusalCode.NOT_FOUND),
        body=keys.RotateBody,
        is_body_optional=True,
    ),
    get_route(
        "list_audit",
        "/api/audit",
        "Who changed what, in order of time",
        ADMIN,
        keys.AuditList,
        query=keys.AuditQuery,
    ),
)


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


PAYERS = frozenset({Role.ADMIN, Role.OPERATOR, Role.TENANT})
"""Who sees money: a tenant its own."""


TENANTS = of_noun(
    "tenants",
    get_route(
        "list_tenants",
        "/api/tenants",
        "Tenants that were set up, by their ids",
        OPERATORS,
        tenants.TenantList,
        query=bodies.PageQuery,
    ),
    Route(
        "create_tenant",
        "POST",
        "/api/tenants",
        "Set up a tenant whose jobs, files and credits lie in a database pool",
        ADMIN,
        body=tenants.TenantBody,
        max_bytes=LISTED_BYTES,
        answers={201: tenants.TenantView},
        refuses=(RefusalCode.DUPLICATE_DIFFERS,),
    ),
    get_route("get_tenant", "/api/tenants/{tenant_id}", "A tenant's settings", OPERATORS, tenants.TenantView),
    Route(
        "change_tenant",
        "PATCH",
        "/api/tenants/{tenant_id}",
        "Change what is said of a tenant; the rest stays as it is",
        ADMIN,
        body=tenants.TenantChange,
        max_bytes=LISTED_BYTES,
        answers={200: tenants.TenantView},
        refuses=_PHASE,
    ),
    post_route(
        "suspend_tenant",
        "/api/tenants/{tenant_id}/suspend",
        "Take nothing new of it and lease nothing of it; what runs may end",
        ADMIN,
        tenants.TenantView,
        refuses=_PHASE,
    ),
    post_route(
        "resume_tenant",
        "/api/tenants/{tenant_id}/resume",
        "Let a suspended tenant work again",
        ADMIN,
        tenants.TenantView,
        refuses=_PHASE,
    ),
    Route(
        "move_tenant",
        "POST",
        "/api/tenants/{tenant_id}/move",
        "Move everything of it to another pool; until it is there nothing new is taken",
        ADMIN,
        body=tenants.MoveBody,
        answers={202: tenants.TenantView},
        refuses=_PHASE,
    ),
    Route(
        "delete_tenant",
        "DELETE",
        "/api/tenants/{tenant_id}",
        "Delete it with its keys, jobs, files, webhooks and credits; it is gone when it is not found any more",
        ADMIN,
        query=tenants.DeleteQuery,
        answers={202: tenants.TenantView},
    ),
)

CREDITS = of_noun(
    "credits",
    get_route(
        "balance",
        "/api/tenants/{tenant_id}/balance",
        "What a tenant has, what of it is held, what is pending",
        PAYERS,
        money.BalanceView,
    ),
    get_route(
        "statement",
        "/api/tenants/{tenant_id}/statement",
        "The entries of a tenant's book, in their order",
        PAYERS,
        money.StatementView,
        query=money.StatementQuery,
    ),
    get_route(
        "list_grants",
        "/api/tenants/{tenant_id}/grants",
        "What was granted, pending and void ones included",
        PAYERS,
        money.GrantList,
        query=bodies.PageQuery,
    ),
    Route(
        "grant_credits",
        "POST",
        "/api/tenants/{tenant_id}/grants",
        "Give credits; the same id again is answered, and not given twice",
        ADMIN,
        body=money.GrantBody,
        answers={201: money.GrantView, 200: money.GrantView},
        refuses=(RefusalCode.DUPLICATE_DIFFERS, *_PHASE),
    ),
    post_route(
        "confirm_grant",
        "/api/tenants/{tenant_id}/grants/{grant_id}/confirm",
        "A pending grant may be spent from now on",
        ADMIN,
        money.GrantView,
        refuses=_PHASE,
    ),
    post_route(
        "void_grant",
        "/api/tenants/{tenant_id}/grants/{grant_id}/void",
        "A pending grant comes to nothing",
        ADMIN,
        money.GrantView,
        refuses=_PHASE,
    ),
    Route(
        "adjust_credits",
        "POST",
        "/api/tenants/{tenant_id}/adjustments",
        "Put a book right by another entry, up or down",
        ADMIN,
        body=money.AdjustBody,
        answers={201: money.BalanceView, 200: money.BalanceView},
        refuses=(RefusalCode.DUPLICATE_DIFFERS, RefusalCode.CREDITS_SHORT, *_PHASE),
    ),
    get_route(
        "usage",
        "/api/usage",
        "What ended rounds took: GPU-seconds, credits and, for operators, cost, by tenant, workflow, worker and day",
        PAYERS,
        money.UsageList,
        query=money.UsageQuery,
        refuses=(RefusalCode.TOO_LARGE,),
    ),
    get_route(
        "export_credits",
        "/api/tenants/{tenant_id}/export",
        "A tenant's book, or what each of its rounds took, line by line for accounting",
        PAYERS,
        bytes,
        query=money.ExportQuery,
    ),
    get_route(
        "job_receipt",
        "/api/jobs/{job_id}/receipt",
        "What a job was held for and what it cost, round by round",
        PAYERS,
        money.ReceiptView,
    ),
)


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
        body=webhooks.SubscriptionBody,
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
        webhooks.CreatedSecret,
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
