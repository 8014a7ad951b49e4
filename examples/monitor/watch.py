"""Print each step of a run: `python watch.py demo runs/demo/broker.json`; needs `nats-py[nkeys]` only.

With credentials of an observer: `python watch.py demo nats://127.0.0.1:4222 keys/observer/nats.creds`.
"""

import asyncio
import json
import sys
from pathlib import Path

import nats


async def main(run: str, server: str, credentials: str) -> None:
    """Subscribe to the metrics of a run."""
    connection = await nats.connect(server, user_credentials=credentials)
    async for message in (await connection.subscribe(f"relax.{run}.metric.trainer.*")).messages:
        body = json.loads(message.data)
        if body.get("kind") == "step":
            print(f"step {body['step']} reward {body['reward']:.3f}", flush=True)


name, broker, *credentials = sys.argv[1:]
if not credentials:
    file = Path(broker)
    broker, keys = (json.loads(file.read_text())[key] for key in ("url", "credentials"))
    credentials = [str(file.parent / keys / "observer" / "nats.creds")]
asyncio.run(main(name, broker, *credentials))
