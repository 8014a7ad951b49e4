"""Subjects that tests of permissions try: of streams, consumers, keys, the server, and neighbours."""

from __future__ import annotations

RUN, OTHER = "guarded", "other"
STREAMS = [
    f"{before}RELAX_{run}_{after}"
    for run in (RUN, OTHER)
    for before, after in (("", "TABLE"), ("", "LOG"), ("KV_", "STATE"))
]
OF_SERVER = ("INFO", "STREAM.NAMES", "STREAM.LIST", "META.LEADER.STEPDOWN", "SERVER.REMOVE", "ACCOUNT.PURGE.x")
OF_STREAM = (
    "STREAM.CREATE.{}",
    "STREAM.UPDATE.{}",
    "STREAM.INFO.{}",
    "STREAM.DELETE.{}",
    "STREAM.PURGE.{}",
    "STREAM.MSG.GET.{}",
    "STREAM.MSG.DELETE.{}",
    "STREAM.SNAPSHOT.{}",
    "STREAM.RESTORE.{}",
    "STREAM.PEER.REMOVE.{}",
    "STREAM.LEADER.STEPDOWN.{}",
    "DIRECT.GET.{}",
    "CONSUMER.CREATE.{}",
    "CONSUMER.NAMES.{}",
    "CONSUMER.LIST.{}",
)
OF_CONSUMER = (
    "CONSUMER.CREATE.{}.{}",
    "CONSUMER.DURABLE.CREATE.{}.{}",
    "CONSUMER.INFO.{}.{}",
    "CONSUMER.DELETE.{}.{}",
    "CONSUMER.MSG.NEXT.{}.{}",
    "CONSUMER.RESET.{}.{}",
    "CONSUMER.PAUSE.{}.{}",
    "CONSUMER.UNPIN.{}.{}",
    "CONSUMER.LEADER.STEPDOWN.{}.{}",
)
CONSUMERS = ("rollout", "reward", "advantages", "prompts@1", "trainer@1", "evaluator@1", "strange")
COLUMNS = ("prompt", "trajectory", "reward", "advantage", "dropped", "quarantined", "requeued", "strange")
KEYS = (
    "run",
    "incarnation.rollout.0",
    "incarnation.trainer.0",
    "lease.rollout.0",
    "lease.trainer.0",
    "lease.node.1",
    "lease.owner.trainer",
    "failure.rollout.group.0.0",
    "failure.1",
    "failure.rollout.0",
    "failure.rollout.group.0.0.0",
    "lease.node",
    "lease.node.1.1",
    "note.address",
)


def tried() -> list[str]:
    """Subjects that every user tries."""
    api = [*OF_SERVER, *(request.format(stream) for request in OF_STREAM for stream in STREAMS)]
    api += [r.format(stream, name) for r in OF_CONSUMER for stream in STREAMS for name in CONSUMERS]
    found = [f"$JS.API.{request}" for request in api]
    for run in (RUN, OTHER):
        found += [f"relax.{run}.{kind}.9.9.{column}" for kind in ("group", "eval") for column in COLUMNS]
        found += [f"relax.{run}.{kind}.9" for kind in ("batch", "weights", "checkpoint", "evaluation", "strange")]
        found += [f"relax.{run}.event.{role}.0.ready" for role in ("rollout", "trainer", "node", "root", "run")]
        found += [f"relax.{run}.metric.{role}.0" for role in ("rollout", "trainer", "node", "root", "run")]
        found += [f"relax.{run}.request.{kind}.9" for kind in ("env", "generate")]
        found += [f"$KV.RELAX_{run}_STATE.{key}" for key in KEYS]
        found += [f"$JS.ACK.RELAX_{run}_TABLE.{name}.1.1.1.0.0" for name in CONSUMERS]
        found += [
            f"view.relax.{run}.weights.9",
            f"_INBOX_{run}_trainer.x",
            f"$JS.API.DIRECT.GET.RELAX_{run}_LOG.relax.x",
        ]
        found += [f"$JS.API.DIRECT.GET.RELAX_{run}_TABLE.relax.{run}.weights.9"]
    return [*found, "$SYS.REQ.SERVER.PING", "$SYS.REQ.ACCOUNT.PING.CONNZ", "$JSC.R.x", "_R_.x.y", "_INBOX.x", "strange"]
