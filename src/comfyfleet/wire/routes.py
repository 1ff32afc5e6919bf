"""ONE table of routes: who may, what is sent, what is answered, what may be refused. What is not here does not exist.

The OpenAPI document, the page docs/protocol.md and the tests of every route with every role are made from it; the hub
binds a handler to each name.
"""

from __future__ import annotations

from typing import Any

from comfyfleet.model.calls import Explanation
from comfyfleet.model.errors import RefusalCode
from comfyfleet.wire import answers, bodies, keys, progress, worker
from comfyfleet.wire.file_routes import FILES
from comfyfleet.wire.route import (
    ADMIN,
    ANYBODY,
    CALLERS,
    LOOKERS,
    OPERATORS,
    READERS,
    WORKER_NOUN,
    WORKERS,
    Route,
    get_route,
    of_noun,
    post_route,
)

_PHASE = (RefusalCode.WRONG_PHASE,)
_LEASE = (RefusalCode.LEASE_LOST,)
_UNKNOWN = (RefusalCode.NOT_FOUND,)
_SUBMIT = (
    RefusalCode.INVALID_WORKFLOW,
    RefusalCode.UNWORKABLE,
    RefusalCode.CREDITS_SHORT,
    RefusalCode.DUPLICATE_DIFFERS,
    RefusalCode.QUEUE_FULL,
)


JOBS = of_noun(
    "jobs",
    Route(
        "submit",
        "POST",
        "/api/jobs",
        "Submit a job; it is durable when the answer comes",
        CALLERS,
        aliases=("/jobs", "/api/ai-jobs"),
        body=bodies.SubmitBody,
        reads=bodies.SpelledSubmit,
        answers={201: answers.SubmittedBody, 200: answers.SubmittedBody},
        refuses=_SUBMIT,
        headers=("Idempotency-Key",),
    ),
    post_route(
        "submit_batch",
        "/api/jobs/batch",
        f"Submit up to {bodies.MAX_BATCH} jobs, each answered by itself",
        CALLERS,
        answers.BatchAnswer,
        aliases=("/jobs/batch", "/api/ai-jobs/batch"),
        body=bodies.BatchBody,
        headers=("Idempotency-Key",),
    ),
    get_route(
        "list_jobs",
        "/api/jobs",
        "List jobs in order of submission",
        READERS,
        answers.JobList,
        aliases=("/jobs", "/api/ai-jobs"),
        query=bodies.ListQuery,
    ),
    get_route(
        "get_job",
        "/api/jobs/{job_id}",
        "The state of a job, with its attempts",
        READERS,
        answers.JobDetails,
        aliases=("/jobs/{job_id}", "/api/ai-jobs/{job_id}"),
    ),
    Route(
        "get_result",
        "GET",
        "/api/jobs/{job_id}/result",
        "What came of a job; 202 while it is open",
        READERS,
        aliases=("/jobs/{job_id}/result",),
        answers={200: answers.ResultBody, 202: answers.ResultBody},
    ),
    Route(
        "watch_job",
        "GET",
        "/api/jobs/{job_id}/progress",
        "Watch a job to its end: Server-Sent Events unless JSON is asked for; 204 when there is nothing left to say",
        READERS,
        aliases=("/api/ai-jobs/{job_id}/progress",),
        query=progress.StreamQuery,
        answers={200: progress.ProgressBody, 204: None},
        headers=("Last-Event-ID",),
        takes_token=True,
        streams=True,
    ),
    Route(
        "job_progress",
        "GET",
        "/jobs/{job_id}/progress",
        "The progress of a job: JSON unless Server-Sent Events are asked for",
        READERS,
        query=progress.StreamQuery,
        answers={200: progress.ProgressBody, 204: None},
        headers=("Last-Event-ID",),
        takes_token=True,
        streams=True,
    ),
    get_route(
        "explain_job",
        "/api/jobs/{job_id}/explain",
        "Why a job is not running",
        READERS,
        Explanation,
        aliases=("/jobs/{job_id}/explain",),
    ),
    post_route(
        "cancel_job",
        "/api/jobs/{job_id}/cancel",
        "Cancel a job: at once while it waits, else its worker is told",
        CALLERS,
        answers.CancelBody,
        aliases=("/jobs/{job_id}/cancel",),
    ),
    post_route(
        "retry_job",
        "/api/jobs/{job_id}/retry",
        "Run a failed or cancelled job again, in a new round",
        CALLERS,
        answers.SubmittedBody,
        aliases=("/jobs/{job_id}/retry",),
        refuses=(*_PHASE, RefusalCode.CREDITS_SHORT),
    ),
    post_route(
        "pause_job",
        "/api/jobs/{job_id}/pause",
        "Keep a waiting job from running; it keeps its place",
        CALLERS,
        answers.JobDetails,
        aliases=("/jobs/{job_id}/pause",),
        refuses=_PHASE,
    ),
    post_route(
        "resume_job",
        "/api/jobs/{job_id}/resume",
        "Let a paused job run again",
        CALLERS,
        answers.JobDetails,
        aliases=("/jobs/{job_id}/resume",),
        refuses=_PHASE,
    ),
    Route(
        "change_job",
        "PATCH",
        "/api/jobs/{job_id}",
        "Change the priority of a waiting job",
        CALLERS,
        aliases=("/jobs/{job_id}",),
        body=bodies.ChangeBody,
        answers={200: answers.JobDetails},
        refuses=_PHASE,
    ),
)

QUEUE = of_noun(
    "queue",
    get_route("stats", "/api/stats", "How many jobs wait, run and ended", READERS, answers.StatsBody),
    post_route(
        "pause_queue", "/api/queue/pause", "Lease nothing until resumed", OPERATORS, answers.QueueBody
    ),
    post_route("resume_queue", "/api/queue/resume", "Lease again", OPERATORS, answers.QueueBody),
    get_route(
        "list_dead",
        "/api/dead-letter",
        "Jobs that failed for good",
        LOOKERS,
        answers.JobList,
        query=bodies.PageQuery,
    ),
    post_route(
        "retry_dead",
        "/api/dead-letter/{job_id}/retry",
        "Run a dead job again, in a new round",
        OPERATORS,
        answers.SubmittedBody,
        refuses=_PHASE,
    ),
    post_route(
        "purge_dead",
        "/api/dead-letter/purge",
        "Forget dead jobs, oldest first",
        OPERATORS,
        answers.PurgeAnswer,
        body=bodies.PurgeBody,
        is_body_optional=True,
    ),
)

FLEET = of_noun(
    "workers",
    Route(
        "events",
        "GET",
        "/api/events",
        "Watch the fleet: Server-Sent Events, best effort, with `resync` where some were left out",
        READERS,
        query=progress.EventsQuery,
        answers={200: None},
        takes_token=True,
        streams=True,
    ),
    get_route(
        "list_workers",
        "/api/workers",
        "Every known worker",
        LOOKERS,
        answers.WorkerList,
        aliases=("/workers",),
    ),
    get_route(
        "get_worker",
        "/api/workers/{worker_id}",
        "One worker, with its capabilities",
        LOOKERS,
        answers.WorkerDetails,
        aliases=("/workers/{worker_id}",),
    ),
    post_route(
        "drain_worker",
        "/api/workers/{worker_id}/drain",
        "Let it finish and leave",
        OPERATORS,
        answers.WorkerDetails,
    ),
    post_route(
        "pause_worker",
        "/api/workers/{worker_id}/pause",
        "Give it nothing new",
        OPERATORS,
        answers.WorkerDetails,
    ),
    post_route(
        "resume_worker",
        "/api/workers/{worker_id}/resume",
        "Give it work again",
        OPERATORS,
        answers.WorkerDetails,
    ),
    Route(
        "remove_worker",
        "DELETE",
        "/api/workers/{worker_id}",
        "Forget a worker and its blocks",
        OPERATORS,
        answers={204: None},
    ),
    get_route("list_blocks", "/api/blocks", "Which worker is kept from what", LOOKERS, answers.BlockList),
    Route(
        "lift_block",
        "DELETE",
        "/api/blocks/{worker_id}/{target}",
        "Lift a block by hand",
        OPERATORS,
        answers={204: None},
    ),
)

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
        refuses=(*_PHASE, *_UNKNOWN),
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

WORKER = of_noun(
    WORKER_NOUN,
    Route(
        "worker_enrol",
        "POST",
        "/api/worker/enrol",
        "Turn an enrolment token into a key for one worker",
        ANYBODY,
        body=worker.EnrolBody,
        answers={201: keys.KeyMade},
        refuses=(RefusalCode.UNAUTHENTICATED, RefusalCode.NOT_ALLOWED),
    ),
    post_route(
        "worker_register",
        "/api/worker/register",
        "Say what a worker offers",
        WORKERS,
        worker.RegisteredBody,
        body=worker.RegisterBody,
    ),
    Route(
        "worker_poll",
        "POST",
        "/api/worker/poll",
        "Ask for a job; parks until there is one. The same poll id gets the same lease",
        WORKERS,
        body=worker.PollBody,
        answers={200: worker.LeaseAnswer, 204: None},
        refuses=_UNKNOWN,
        parks=True,
    ),
    post_route(
        "worker_heartbeat",
        "/api/worker/heartbeat",
        "Renew leases and hear commands",
        WORKERS,
        worker.BeatAnswer,
        body=worker.HeartbeatBody,
        refuses=_UNKNOWN,
    ),
    post_route(
        "worker_progress",
        "/api/worker/progress",
        "News of running jobs, in a batch",
        WORKERS,
        worker.BeatAnswer,
        body=worker.ProgressBatch,
    ),
    post_route(
        "worker_complete",
        "/api/worker/complete",
        "A job is done",
        WORKERS,
        worker.SettledAnswer,
        body=worker.CompleteBody,
        refuses=_LEASE,
    ),
    post_route(
        "worker_fail",
        "/api/worker/fail",
        "A job failed, and how",
        WORKERS,
        worker.SettledAnswer,
        body=worker.FailBody,
        refuses=_LEASE,
    ),
    post_route(
        "worker_release",
        "/api/worker/release",
        "Give a lease back",
        WORKERS,
        worker.SettledAnswer,
        body=worker.ReleaseBody,
        refuses=_LEASE,
    ),
    post_route(
        "worker_commands",
        "/api/worker/commands",
        "Parks until there is something to tell the worker",
        WORKERS,
        worker.CommandsAnswer,
        body=worker.CommandsBody,
        parks=True,
    ),
    Route(
        "worker_unregister",
        "POST",
        "/api/worker/unregister",
        "Take nothing until registered again",
        WORKERS,
        body=worker.UnregisterBody,
        answers={204: None},
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
    get_route("openapi", "/openapi.json", "This protocol as OpenAPI 3.1", ANYBODY, dict[str, Any]),
)

ROUTES: tuple[Route, ...] = (*JOBS, *FILES, *QUEUE, *FLEET, *KEYS, *WORKER, *HUB)
