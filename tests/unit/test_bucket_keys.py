"""Keys of the bucket: malformed ones are ignored, whatever tokens a client has written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.bucket_keys import failed_row, failure_key, incarnation_key, lease_key, lease_kind, role_of
from broker.lease_entries import lease_of, signed
from broker.subjects import RowId
from relax_actors.training.strays import allowed_bytes

ROLES = ("rollout", "trainer")
KINDS = ("failure", "lease", "incarnation", "run", "note")
NAMES = (*KINDS, *ROLES, "node", "owner", "group", "eval", "0", "17")
TOKENS = st.sampled_from((*NAMES, "01", "-1", "*", ">", "", "é", "\u0661", "9" * 40)) | st.text(max_size=4)
KEYS = st.lists(TOKENS, min_size=1, max_size=7).map(".".join)
ACTOR = {"pid": 7, "incarnation": 2, "since": 1.5, "rows": [], "waits_for": None, "doing_since": None}


@given(KEYS)
def test_a_key_that_is_accepted_is_one_that_the_run_writes(key: str) -> None:
    row = failed_row(key)
    assert row is None or failure_key(role_of(key), row) == key
    kind, number = lease_kind(key), key.rpartition(".")[2]
    assert kind is None or lease_key(kind, number) == key
    size = allowed_bytes(key, ROLES)
    assert size == 0 or key.partition(".")[0] in KINDS


@given(KEYS)
def test_only_the_key_of_a_lease_has_a_lease(key: str) -> None:
    state = lease_of(key, signed(key, ACTOR), {"Nats-TTL": "10"})
    assert isinstance(state, str) or (lease_kind(key) not in (None, "node", "root", "owner") and state == ACTOR)


def test_keys_are_parsed_as_they_are_built() -> None:
    row = RowId(3, 17, "eval")
    assert failed_row(failure_key("rollout", row)) == row
    assert lease_kind(lease_key("rollout", 1003)) == "rollout"
    assert lease_kind(lease_key("owner", "trainer")) == "owner"
    assert role_of(incarnation_key("rollout", 0)) == "rollout"


MALFORMED = ("failure", "failure.1", "failure.1.2", "failure.a.group.1", "run", "lease.a.b", "lease")


@pytest.mark.parametrize("key", MALFORMED)
def test_keys_with_other_parts_name_nothing(key: str) -> None:
    assert failed_row(key) is None
    assert lease_kind(key) is None
