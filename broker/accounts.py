"""Accounts of a run's broker: one owns the streams; each user's imports its subjects.

The server publishes the answer to a request on whatever subject the request names. Were all users in the account of the
streams, a user could name a request of the JetStream API there, and the server would execute it. In an account of its
own such a subject means nothing, and an answer from the account of the streams returns under a subject that the server
chose.

A message that an account imported as a service is not exported again as a stream. So the streams republish below
`view.` what they have stored, and users import their subscriptions from there. For the same reason a user that answers
requests of other users exports them from its own account, and these import from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from broker.permissions import API, Permissions, matches

VIEW = "view"
INFO = f"{API}.INFO"
"""Request that every account imports, although no user may send it. An account without this import gets one of the
whole API from the server, which then answers each request a second time, with "JetStream not enabled for account"."""
RESPONSE_SECONDS = 30
"""Time after which the server forgets the reply subject of a request that has several answers."""
ANSWER_SECONDS = 60
"""The same for requests that a user answers, who must send something more often."""
_SEVERAL_ANSWERS = re.compile(rf"{re.escape(API)}\.(CONSUMER\.MSG\.NEXT\..+|DIRECT\.GET\.[^.]+)")
"""Requests with several answers. `DIRECT.GET.<stream>.<subject>` has one, after which the server forgets its reply
subject; otherwise it would keep those of all look-ups of half a minute."""


def view_of(subject: str) -> str:
    """Subject under which a stream republishes what it has stored on `subject`."""
    return f"{VIEW}.{subject}"


def exports(users: Iterable[Permissions]) -> list[dict[str, Any]]:
    """Exports of the account that owns the streams, as claims: all that its users import."""
    granted = list(users)
    served = {subject for user in granted for subject in user.serves}
    services = _widest(subject for user in granted for subject in (INFO, *user.publish) if subject not in served)
    views = _widest(view_of(subject) for user in granted for subject in _subscribed(user))
    return [_service(subject) for subject in services] + [
        {"name": subject, "subject": subject, "type": "stream"} for subject in views
    ]


def own_exports(user: Permissions) -> list[dict[str, Any]]:
    """Return the exports of a user's account, as claims: the requests that the user answers."""
    return [
        {"name": subject, "subject": subject, "type": "service"} | _answered_for(ANSWER_SECONDS)
        for subject in _widest(user.serves)
    ]


def imports(user: Permissions, owner: str, served: Mapping[str, str]) -> list[dict[str, Any]]:
    """Imports of a user's account, as claims.

    `owner` is the public key of the account that owns the streams, and `served` that of the account that answers, by
    the subject of the requests.
    """
    services = [
        {"name": subject, "subject": subject, "account": served.get(subject, owner), "type": "service"}
        for subject in _widest((INFO, *user.publish))
    ]
    return services + [
        {
            "name": subject,
            "subject": view_of(subject),
            "account": owner,
            "type": "stream",
            "local_subject": _numbered_wildcards(subject),
        }
        for subject in _widest(_subscribed(user))
    ]


def requests_to(served: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return imports of other accounts' requests, as claims; `served` are keys by subject."""
    return [{"name": subject, "subject": subject, "account": key, "type": "service"} for subject, key in served.items()]


def _service(subject: str) -> dict[str, Any]:
    claims: dict[str, Any] = {"name": subject, "subject": subject, "type": "service"}
    if _SEVERAL_ANSWERS.fullmatch(subject):
        claims |= _answered_for(RESPONSE_SECONDS)
    return claims


def _answered_for(seconds: int) -> dict[str, Any]:
    """Claims of a request with several answers, at most so many seconds apart."""
    return {"response_type": "Stream", "response_threshold": seconds * 10**9}


def _subscribed(user: Permissions) -> list[str]:
    """Subjects that a user subscribes to, without its own inbox."""
    return [subject for subject in user.subscribe if not subject.startswith("_INBOX")]


def _widest(subjects: Iterable[str]) -> list[str]:
    """Leave out subjects that others contain: an account may not list a subject twice."""
    unique = list(dict.fromkeys(subjects))
    return [subject for subject in unique if not any(other != subject and matches(other, subject) for other in unique)]


def _numbered_wildcards(subject: str) -> str:
    """Name the wildcards of a mapped subject by their position: `a.*.b.*` becomes `a.$1.b.$2`."""
    parts, n = subject.split("."), 0
    for i, part in enumerate(parts):
        if part == "*":
            n += 1
            parts[i] = f"${n}"
    return ".".join(parts)
