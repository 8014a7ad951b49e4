"""Print each step of a run: `python watch.py demo runs/demo/broker.json`; needs `nats-py[nkeys]` only.

With credentials of an observer: `python watch.py demo nats://127.0.0.1:4222 keys/observer/nats.creds`.
"""

import asyncio
import json
import sys
from pathlib import Path

import nats


async def main(run: str, server: str, **login: str) -> None:
    """Subscribe to the metrics of a run."""
    connection = await nats.connect(server, **login)
    async for message in (await connection.subscribe(f"relax.{run}.metric.trainer.*")).messages:
        body = json.loads(message.data)
        if body.get("kind") == "step":
            print(f"step {body['step']} reward {body['reward']:.3f}", flush=True)


name, broker, *credentials = sys.argv[1:]
if credentials:
    asyncio.run(main(name, broker, user_credentials=credentials[0]))
else:
    embedded = json.loads(Path(broker).read_text())
    asyncio.run(main(name, embedded["url"], user=embedded["user"], password=embedded["password"]))
