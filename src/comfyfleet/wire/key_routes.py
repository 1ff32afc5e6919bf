"""The rows of the table of routes that are about keys, enrolment and the audit log."""

from __future__ import annotations

from comfyfleet.model.errors import RefusalCode
from comfyfleet.wire import bodies, keys
from comfyfleet.wire.route import ADMIN, OPERATORS, WORKERS, Route, get_route, of_noun, post_route

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
        answers={201: keys.KeyMade},
    ),
    Route(
        "revoke_key", "DELETE", "/api/keys/{key_id}", "End a key at once", ADMIN, answers={200: keys.KeyView}
    ),
    post_route(
        "rotate_key",
        "/api/keys/{key_id}/rotate",
        "Give a key a new secret, shown once",
        ADMIN,
        keys.KeyMade,
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
        answers={201: keys.EnrolmentMade},
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
        keys.KeyMade,
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
