"""A sender of weights in a process of its own: `python -m tests.support.sending <MiB>`.

It offers the tensors of `content`, prints its address, and runs until its input ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from relax_actors.weights.protocols import WeightPayload
from relax_actors.weights.transports.torch_transport.sender import Address, TorchSender

OFFERED = "f" * 32


def content(mib: int) -> WeightPayload:
    generator = torch.Generator().manual_seed(mib)
    large = torch.randint(0, 256, (mib << 20,), dtype=torch.uint8, generator=generator)
    return WeightPayload(None, {"large": large, "small": torch.arange(5.0), "empty": torch.zeros(0, 3).bfloat16()})


@contextmanager
def sending(mib: int) -> Iterator[tuple[subprocess.Popen[str], Address]]:
    command = [sys.executable, "-m", "tests.support.sending", str(mib)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield child, Address(**json.loads(child.stdout.readline()))
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


def main() -> None:
    sender = TorchSender("127.0.0.1", 60.0)
    sender.offer(OFFERED, [content(int(sys.argv[1]))])
    print(json.dumps(asdict(sender.address)), flush=True)  # noqa: T201 its one line
    sys.stdin.read()


if __name__ == "__main__":
    main()
