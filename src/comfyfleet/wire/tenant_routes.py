"""The rows of the table of routes that are about tenants and their money."""

from __future__ import annotations

from comfyfleet.model.access import Role
from comfyfleet.model.errors import RefusalCode
from comfyfleet.wire import bodies, tenants, usage
from comfyfleet.wire import credits as money
from comfyfleet.wire.route import ADMIN, LISTED_BYTES, OPERATORS, Route, get_route, of_noun, post_route

PAYERS = frozenset({Role.ADMIN, Role.OPERATOR, Role.TENANT})
"""Who sees money: a tenant its own."""

_PHASE = (RefusalCode.WRONG_PHASE,)

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
        usage.UsageList,
        query=usage.UsageQuery,
        refuses=(RefusalCode.TOO_LARGE,),
    ),
    get_route(
        "export_credits",
        "/api/tenants/{tenant_id}/export",
        "A tenant's book, or what each of its rounds took, line by line for accounting",
        PAYERS,
        bytes,
        query=usage.ExportQuery,
    ),
    get_route(
        "job_receipt",
        "/api/jobs/{job_id}/receipt",
        "What a job was held for and what it cost, round by round",
        PAYERS,
        money.ReceiptView,
    ),
)
