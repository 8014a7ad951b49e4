"""Print each step of a run: `python watch.py nats://127.0.0.1:4222 keys/observer demo`; needs `nats-py[nkeys]` only."""

import asyncio
import json
import sys

import nats


async def main(url: str, keys: str, run: str) -> None:
    """Subscribe to the metrics of a run with the credentials of an observer."""
    connection = await nats.connect(url, user_credentials=f"{keys}/nats.creds")
    async for message in (await connection.subscribe(f"relax.{run}.metric.trainer.*")).messages:
        body = json.loads(message.data)
        if body.get("kind") == "step":
            print(f"step {body['step']} reward {body['reward']:.3f}", flush=True)


asyncio.run(main(*sys.argv[1:4]))
