"""Messages of the built-in roles: one dataclass for each column and each numbered cell.

Names are imported on first use: a dataclass takes a millisecond, and commands that read a run need few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.lazy import lazy

if TYPE_CHECKING:
    from relax_actors.messages.cells import (
        Advantage,
        Batch,
        Checkpoint,
        CriticVersion,
        Dropped,
        DropReason,
        Evaluation,
        Prompt,
        Quarantined,
        Readmitted,
        Redelivery,
        Requeued,
        Reward,
        RowCounts,
        Shard,
        Weights,
    )
    from relax_actors.messages.environment import (
        Act,
        EnvironmentAnswer,
        EnvironmentAnswers,
        EnvironmentRequest,
        Fault,
        Open,
    )
    from relax_actors.messages.media import KINDS_OF_MEDIA, Media, MediaSource, ObservedMedia, PreparedPrompt
    from relax_actors.messages.samples import NOT_SAMPLED, FinishReason, Sample, TokenSequence
    from relax_actors.messages.session_log import SessionLog, SessionState, SessionStep, SessionTurn, Turn
    from relax_actors.messages.teacher import TeacherScores
    from relax_actors.messages.trajectory import Trajectory
else:
    __getattr__ = lazy(__name__)

__all__ = [
    "KINDS_OF_MEDIA",
    "NOT_SAMPLED",
    "Act",
    "Advantage",
    "Batch",
    "Checkpoint",
    "CriticVersion",
    "DropReason",
    "Dropped",
    "EnvironmentAnswer",
    "EnvironmentAnswers",
    "EnvironmentRequest",
    "Evaluation",
    "Fault",
    "FinishReason",
    "Media",
    "MediaSource",
    "ObservedMedia",
    "Open",
    "PreparedPrompt",
    "Prompt",
    "Quarantined",
    "Readmitted",
    "Redelivery",
    "Requeued",
    "Reward",
    "RowCounts",
    "Sample",
    "SessionLog",
    "SessionState",
    "SessionStep",
    "SessionTurn",
    "Shard",
    "TeacherScores",
    "TokenSequence",
    "Trajectory",
    "Turn",
    "Weights",
]
