"""The rows of the table of routes that are about files: announced by a key or a lease, moved by signed links."""

from __future__ import annotations

from comfyfleet.model.errors import RefusalCode
from comfyfleet.wire import bodies, files
from comfyfleet.wire.route import (
    ANYBODY,
    CALLERS,
    LISTED_BYTES,
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
        "Announce a file; the answer has a link to PUT it to",
        CALLERS,
        body=files.FileBody,
        answers={201: files.FileView},
        refuses=(RefusalCode.NOT_FOUND, RefusalCode.TOO_LARGE),
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
