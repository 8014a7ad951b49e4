"""Print each step of a run: `python watch.py nats://127.0.0.1:4222 keys/observer demo`; needs only `nats-py[nkeys]`."""

import asyncio
import json
import sys

import nats


async def main(url: str, keys: str, run: str) -> None:
    """Hear a run's metrics; an observer's credentials allow to hear everything and to write nothing."""
    connection = await nats.connect(url, user_credentials=f"{keys}/nats.creds")
    async for message in (await connection.subscribe(f"relax.{run}.metric.trainer.*")).messages:
        body = json.loads(message.data)
        if body.get("kind") == "step":
            print(f"step {body['step']} reward {body['reward']:.3f}", flush=True)


asyncio.run(main(*sys.argv[1:4]))
