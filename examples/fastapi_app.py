"""A small FastAPI app in front of a hub: its users ask for pictures, follow their progress and download them.

    .venv/bin/pip install fastapi                # only this example needs it
    .venv/bin/comfyfleet up --fake 1             # in another terminal; with real servers leave out --fake 1
    export COMFYFLEET_KEY=$(.venv/bin/comfyfleet key create tenant --tenant pictures)
    .venv/bin/uvicorn --app-dir examples fastapi_app:app --port 8000

    curl -X POST 'http://127.0.0.1:8000/pictures?prompt=a+red+boat'    # {"id": "…"}
    curl -N http://127.0.0.1:8000/pictures/ID/progress
    curl -o picture.png http://127.0.0.1:8000/pictures/ID

The app submits with the key in COMFYFLEET_KEY. Without it, on the hub's own machine, it would use the administrator's
key. COMFYFLEET_HUB names a hub elsewhere. Users of the app get no key.
A real app also checks who asks: it stores the job's id with its user and answers 404 to everybody else.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from comfyfleet import Fault, FleetClient, Refusal

WORKFLOW = json.loads((Path(__file__).parent / "workflows" / "text_to_image.json").read_text())
PROMPT_NODE = "6"
STATUS = {"not_found": 404, "rate_limited": 429, "queue_full": 503, "unavailable": 503}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # One client for all requests: it keeps its connections to the hub open.
    async with FleetClient() as client:
        app.state.fleet = client
        yield


app = FastAPI(title="Pictures", lifespan=lifespan)


@app.exception_handler(Refusal)
async def refused(_request: Request, refusal: Refusal) -> JSONResponse:
    return JSONResponse({"detail": refusal.message}, STATUS.get(refusal.code, 400))


@app.exception_handler(Fault)
async def unreachable(_request: Request, fault: Fault) -> JSONResponse:
    return JSONResponse({"detail": str(fault)}, 503)


@app.post("/pictures", status_code=201)
async def submit(request: Request, prompt: str) -> dict[str, str]:
    fleet: FleetClient = request.app.state.fleet
    node = WORKFLOW[PROMPT_NODE]
    workflow = {**WORKFLOW, PROMPT_NODE: {**node, "inputs": {**node["inputs"], "text": prompt}}}
    job = await fleet.submit(workflow, metadata={"app": "pictures"})
    return {"id": job.id}


@app.get("/pictures/{job_id}/progress")
async def progress(request: Request, job_id: str) -> StreamingResponse:
    fleet: FleetClient = request.app.state.fleet
    await fleet.get(job_id)  # an unknown job is answered with 404 before the stream begins

    async def events() -> AsyncIterator[str]:
        async for update in fleet.watch(job_id):
            data = {"status": update.status, "percentage": update.percentage, "message": update.message}
            yield f"event: {update.kind}\ndata: {json.dumps(data)}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@app.get("/pictures/{job_id}")
async def picture(request: Request, job_id: str) -> Response:
    fleet: FleetClient = request.app.state.fleet
    ended = await fleet.result(job_id)
    if ended.error is not None:
        raise HTTPException(500, ended.error.message)
    if ended.result is None or not ended.result.files:
        raise HTTPException(409, f"there is no picture: the job is {ended.status}")
    return Response(await fleet.fetch(ended.result.files[0]), media_type="image/png")
