"""`/api/profile`: a trace that `relax profile` had an actor write, by its name; never by a path."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from relax_actors.console.errors import RequestError
from relax_actors.console.query import Query
from relax_actors.monitoring.timeline.profiles import profiles_of


async def answer(query: Query) -> Response:
    """Return the file of parameter `name` from the folder `profiles` of the run."""
    name = query.text("name")
    path = next((path for path in profiles_of(query.run.folder) if path.name == name), None)
    if path is None:
        msg = f"the folder of the run has no profile {name[:80]!r}; an actor on another machine keeps its own"
        raise RequestError(404, msg, "unknown_profile")
    return Response(await asyncio.to_thread(path.read_bytes), media_type="application/gzip")
