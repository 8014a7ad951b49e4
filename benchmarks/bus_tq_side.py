"""TransferQueue's bus, producer and consumer for `bus.py`, in its environment: `python bus_tq_side.py ROLE WORKLOAD`.

Storage is SimpleStorage with 2 units, the default. `polling_mode` is on, because a waiting consumer would otherwise
block the controller for all clients; the consumer polls every 2 ms.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ray
import torch
import transfer_queue as tq
from bus_workload import MARK, Workload, arguments, check, serve
from omegaconf import OmegaConf
from tensordict import TensorDict

HOST = "127.0.0.1"
FIELDS = ["prompt", "response", "logprobs"]
POLL_SECONDS, PATIENCE = 0.002, 60.0


def run_bus(work: Workload) -> None:
    """Print the address, then keep Ray and TransferQueue up until the driver closes the input."""
    context = ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=work.place, _node_ip_address=HOST
    )
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    print(MARK + context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    tq.close()
    ray.shutdown()


def client_of(work: Workload) -> Any:
    """Connect like a joining process."""
    torch.set_num_threads(1)
    ray.init(address=work.place, log_to_driver=False)
    tq.init()
    return tq.get_client()


class Producer:
    """Puts each batch with one call into a separate partition: a partition takes one call without metadata."""

    def __init__(self, work: Workload) -> None:
        self.work, self.client = work, client_of(work)

    def put(self, first: int, count: int) -> None:
        """Put batches."""
        for number in range(first, first + count):
            tensors = {name: torch.from_numpy(array) for name, array in self.work.batch(number).items()}
            data = TensorDict(tensors, batch_size=self.work.samples)
            self.client.put(data=data, partition_id=str(number))


class Consumer:
    """Takes batches, reads every byte, and clears them."""

    def __init__(self, work: Workload) -> None:
        self.work, self.client = work, client_of(work)

    def get(self, first: int, count: int) -> None:
        """Take batches `first` to `first + count - 1`."""
        for number in range(first, first + count):
            end = time.monotonic() + PATIENCE
            meta = self._meta(number)
            while meta.size < self.work.samples:
                if time.monotonic() > end:
                    sys.exit(f"batch {number} did not arrive within {PATIENCE:g} s")
                time.sleep(POLL_SECONDS)
                meta = self._meta(number)
            data = self.client.get_data(meta)
            check(self.work, number, sum(float(data[name].sum(dtype=torch.float64)) for name in FIELDS))
            self.client.clear_samples(meta)

    def _meta(self, number: int) -> Any:
        return self.client.get_meta(
            data_fields=FIELDS, batch_size=self.work.samples, partition_id=str(number), task_name="train"
        )


if __name__ == "__main__":
    role, workload = arguments()
    if role == "bus":
        run_bus(workload)
    elif role == "put":
        serve({"put": Producer(workload).put})
    else:
        serve({"get": Consumer(workload).get})
