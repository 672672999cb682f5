"""Who may see and do what: every route, every role, and the rows of other people's DAGs."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import pytest

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Outcome, Settlement, State
from airflow_runguard.plugin import RunguardPlugin
from tests.core import books, engine
from tests.ui.conftest import Api, Person, order, put
from tests.ui.rights import ROLES

STATIC = files("airflow_runguard.ui") / "static"
SHELL = {"/", "/ui", "/ui/"}
"""Without data, so that a session that ended can say so."""
FROM_THE_ROOT = r"""(?:href=|src=|href: |from |import\(|fetch\(|URL\()["'`]/"""
REASON = {"reason": "looked it up"}
SEEN = {"fence": 1, "generation": 1, **REASON}
BODIES: dict[str, dict[str, Any]] = {
    "/api/records/{record_id}/resolve": {**SEEN, "answer": "happened"},
    "/api/records/{record_id}/reopen": SEEN,
    "/api/records/{record_id}/items/reopen": {**SEEN, "items": ["item-1"]},
    "/api/records/{record_id}/release": SEEN,
    "/api/records/{record_id}/resume": SEEN,
    "/api/records/{record_id}/repair": {**REASON, "seen": "0" * 64},
    "/api/gates/close": {**REASON, "gate": "stripe", "until": "2030-01-01T00:00:00Z"},
    "/api/gates/open": {**REASON, "gate": "stripe"},
    "/api/gates/rate": {**REASON, "gate": "stripe", "rate": 1},
    "/api/freezes": {**REASON, "scope": "all"},
    "/api/freezes/thaw": {**REASON, "scope": "all"},
}


def paths(api: Api, method: str) -> list[str]:
    described = api.app.openapi()["paths"]
    return [path for path, methods in described.items() if method.lower() in methods]


def call(api: Api, method: str, path: str, headers: dict[str, str], record_id: int = 1) -> int:
    body = BODIES.get(path) if method == "POST" else None
    query = {"before": 10} if path.endswith("/events") else {"ids": [1]} if path.endswith("/lines") else {}
    answer = api.client.request(method, path.format(record_id=record_id), json=body, params=query, headers=headers)
    return int(answer.status_code)


def test_every_route_of_the_api_refuses_who_has_no_token(api: Api) -> None:
    asked = [("GET", path) for path in (*paths(api, "GET"), "/api/openapi.json")]
    asked += [("POST", path) for path in paths(api, "POST")]
    assert len(asked) > 15
    assert {one: call(api, *one, headers={}) for one in asked} == dict.fromkeys(asked, 401)
    assert {one: call(api, *one, headers={"Authorization": "Bearer forged"}) for one in asked} == dict.fromkeys(
        asked, 403
    )


def test_every_route_that_changes_something_is_tried_here_and_none_of_them_is_a_get(api: Api) -> None:
    assert set(paths(api, "POST")) == set(BODIES)
    described = api.app.openapi()["paths"]
    assert {method for methods in described.values() for method in methods} == {"get", "post"}


@pytest.mark.parametrize("name", ["ann", "otto", "uma", "vic"])
def test_whoever_may_see_all_dags_reads_and_only_who_may_edit_changes(api: Api, ledger: Ledger, name: str) -> None:
    held = put(ledger, "invoice/1", State.IN_DOUBT)
    headers = api.as_(name).headers
    for path in paths(api, "GET"):
        assert call(api, "GET", path, headers, held.id) == 200, path
    viewer = ROLES[name] == "VIEWER"
    for path in BODIES:
        status = call(api, "POST", path, headers, held.id)
        assert status == 403 if viewer else status in (200, 409), (path, status)
    record = ledger.get(held.order.identity)
    assert record is not None
    assert record.state is (State.IN_DOUBT if viewer else State.DONE)


@pytest.mark.parametrize("name", ["dora", "reed"])
def test_rows_of_other_dags_are_not_there_for_who_may_see_only_one(api: Api, ledger: Ledger, name: str) -> None:
    mine, others = put(ledger, "mine", State.IN_DOUBT), put(ledger, "others", State.IN_DOUBT, dag_id="ship")
    person = api.as_(name)
    assert person.keys() == ["mine"]
    assert person.keys(sort="name") == ["mine"]
    assert person.keys(needs_person=True, sort="oldest") == ["mine"]
    assert person.keys(run_id="r1") == ["mine"]
    assert person.keys(dag_id="ship") == []
    assert [r["key"] for r in person.see("records/lines", ids=[mine.id, others.id])["records"]] == ["mine"]
    assert "others" not in person.get("records/export").text
    for path in paths(api, "GET"):
        if "{record_id}" in path:
            assert call(api, "GET", path, person.headers, others.id) == 404, path
            assert call(api, "GET", path, person.headers, mine.id) == 200, path
    overview = person.see("overview")
    assert [r["key"] for r in overview["needs_person"]] == ["mine"]
    assert sum(count["n"] for count in overview["counts"]) == 1
    assert overview["prevented"]["doubt"] == {"n": 1, "more": False}
    assert person.keys(prevented="doubt") == ["mine"]
    for path in BODIES:
        status = call(api, "POST", path, person.headers, others.id)
        assert status == (404 if "{record_id}" in path else 403), path
    record = ledger.get(others.order.identity)
    assert record is not None
    assert record.state is State.IN_DOUBT


def test_what_may_be_read_may_not_yet_be_changed(api: Api, ledger: Ledger) -> None:
    held = put(ledger, "mine", State.IN_DOUBT)
    body = {**BODIES["/api/records/{record_id}/resolve"], "fence": held.claim.fence}
    assert api.as_("reed").post(f"records/{held.id}/resolve", body).status_code == 403
    assert api.as_("dora").post(f"records/{held.id}/resolve", body).status_code == 200


def test_rows_of_deleted_dags_are_for_those_who_may_see_all(api: Api, ledger: Ledger) -> None:
    gone, none = put(ledger, "gone", State.IN_DOUBT, dag_id="gone"), put(ledger, "none", State.IN_DOUBT, dag_id="")
    for name, seen in (("vic", ["none", "gone"]), ("dora", [])):
        person = api.as_(name)
        assert person.keys() == seen
        for held in (gone, none):
            assert person.get(f"records/{held.id}").status_code == (200 if seen else 404)


def test_a_gate_tells_nobody_of_tasks_that_they_may_not_see(api: Api, ledger: Ledger) -> None:
    secret = engine.holder(dag_id="ship", task_id="pay_acme", run_id="manual__merger")
    held = books.enter(ledger, order("others", gate="stripe"), secret)
    held.write(
        outcomes=[Outcome("body", failure=books.QUOTA, error="429: account acct_ACME is over its limit")],
        settlement=Settlement(State.PAUSED, failure=books.QUOTA, error="429: account acct_ACME is over its limit"),
    )
    ledger.claim(order("others too", gate="stripe"), engine.holder(dag_id="ship"))
    claim = ledger.claim(order("mine", gate="stripe"), engine.holder(dag_id="bill"))
    reed, vic = api.as_("reed"), api.as_("vic")

    def gates(person: Person) -> list[Any]:
        seen = [person.see("gates")["gates"], person.see("overview")["gates"]]
        return [one for (one,) in (*seen, [person.see(f"records/{claim.record_id}")["gate"]])]

    assert [(one["why"], one["actor"], one["waiting"]) for one in gates(reed)] == [(None, None, 1)] * 3
    for one in gates(vic):
        assert ("ACME" in one["why"], "merger" in one["actor"], one["waiting"]) == (True, True, 3)
    queries: dict[str, dict[str, Any]] = {"/events": {"before": 2**40}, "/lines": {"ids": [claim.record_id]}}
    for path in paths(api, "GET"):
        query = queries.get(path[path.rindex("/") :], {})
        said = reed.get(path.removeprefix("/api/").format(record_id=claim.record_id), **query).text
        assert not [word for word in ("ACME", "acme", "merger") if word in said], path
    assert "a call was told to wait" in reed.see(f"records/{claim.record_id}")["record"]["error"]

    until = datetime(2030, 1, 1, tzinfo=UTC)
    ledger.close_gate("stripe", until=until, rate=5.0, actor="person:ann", reason="over the budget")
    assert [(one["why"], one["actor"]) for one in gates(reed)] == [("over the budget", None)] * 3
    again = ledger.claim(order("mine too", gate="stripe"), engine.holder(dag_id="bill"))
    assert "over the budget" in reed.see(f"records/{again.record_id}")["record"]["error"]


def test_a_freeze_of_one_dag_is_for_who_may_change_it_and_of_more_for_who_may_change_all(api: Api) -> None:
    dora, uma = api.as_("dora"), api.as_("uma")
    frozen = {**REASON, "scope": "dag_id", "value": "bill"}
    assert dora.post("freezes", frozen).status_code == 200
    assert dora.post("freezes", {**frozen, "value": "ship"}).status_code == 403
    assert dora.post("freezes", {**frozen, "scope": "namespace"}).status_code == 403
    assert uma.post("freezes", {**frozen, "value": "ship"}).status_code == 200
    assert [f["value"] for f in dora.see("gates")["freezes"]] == ["bill"]
    assert dora.see("gates")["history"] == []
    assert [f["value"] for f in uma.see("gates")["freezes"]] == ["ship", "bill"]


# -- forged requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"X-Runguard-Request": "1", "Sec-Fetch-Site": "same-origin"}, True),
        ({"X-Runguard-Request": "1"}, True),
        ({}, False),
        ({"Sec-Fetch-Site": "same-origin"}, False),
        ({"X-Runguard-Request": "1", "Sec-Fetch-Site": "cross-site"}, False),
        ({"X-Runguard-Request": "1", "Sec-Fetch-Site": "same-site"}, False),
    ],
    ids=["our own page", "an old browser", "a form", "without our header", "another site", "a sibling subdomain"],
)
def test_a_change_by_cookie_must_come_from_our_own_page(
    api: Api, ledger: Ledger, headers: dict[str, str], allowed: bool
) -> None:
    held = put(ledger, "invoice/1", State.IN_DOUBT)
    body = {**BODIES["/api/records/{record_id}/resolve"], "fence": held.claim.fence}
    cookie = {"Cookie": f"_token={api.token('ann')}"}
    answer = api.client.post(f"/api/records/{held.id}/resolve", json=body, headers={**cookie, **headers})
    assert answer.status_code == (200 if allowed else 403), answer.text
    record = ledger.get(held.order.identity)
    assert record is not None
    assert (record.state is State.DONE) is allowed


def test_the_shell_and_its_files_hold_no_data_and_forbid_everything_from_elsewhere(api: Api, ledger: Ledger) -> None:
    put(ledger, "a-customer-s-name", State.IN_DOUBT)
    for path in itertools.chain(SHELL, (f"/static/{file.name}" for file in STATIC.iterdir())):
        answer = api.client.get(path)
        assert answer.status_code == 200, path
        assert "a-customer-s-name" not in answer.text
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(FROM_THE_ROOT, answer.text), f"{path}: Airflow may be served under a prefix"
    assert all(not view["href"].startswith("/") for view in RunguardPlugin.external_views)
    assert api.client.get("/docs").status_code == api.client.get("/openapi.json").status_code == 404
