"""The pages in a real browser: under a prefix of ``[api] base_url``, by keyboard alone, and where their links lead."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import State
from demo.ground import Ground
from demo.stack import USER
from tests.scheduler.looking import Page, doubtful

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(900)]

PREFIX = "/team-a"
BEHIND = """
    create schema if not exists slow;
    create or replace function slow.clock_timestamp() returns timestamptz language sql volatile
        as $$ select pg_catalog.clock_timestamp() - interval '90 s' $$
"""
"""A ledger whose clock is behind that of the api-server: for connections that look here first."""
OUTLINED = """(element) => {
    const style = getComputedStyle(element);
    return element.matches(":focus-visible") && style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
}"""


@pytest.fixture(scope="module")
def team(browser: Any, ground: Ground) -> Iterator[Page]:
    """Airflow under a prefix, served by an api-server of its own, whose clock is 90 s ahead of the ledger's."""
    with psycopg.connect(ground.ledger_url) as connection:
        connection.execute(BEHIND)
    slow = urllib.parse.quote("-csearch_path=slow,pg_catalog,public")
    env = {"AIRFLOW_CONN_RUNGUARD_LEDGER": f"{ground.ledger_url}?options={slow}"}
    with ground.airflow.another_api_server(PREFIX, env) as url:
        page = Page(browser, url, USER)
        yield page
        page.page.context.close()
    assert page.errors == []


def record_of(ledger: Ledger, key: str) -> int:
    return next(record.id for record in ledger.list(limit=1_000) if record.identity.key == key)


def state_of(ledger: Ledger, record_id: int) -> State:
    return next(record.state for record in ledger.list(after=record_id - 1, limit=1))


def test_under_a_prefix_the_navigation_leads_to_the_overview_a_list_a_record_and_an_action(
    team: Page, ledger: Ledger
) -> None:
    record_id = doubtful(ledger, "prefixed/one")
    team.page.goto(f"{team.url}/")
    team.page.get_by_role("link", name="Ledger").click()
    frame = team.frame()
    frame.locator("a.figure", has_text="In doubt").click()
    frame.get_by_label("Key begins with").fill("prefixed/")
    frame.get_by_role("button", name="Filter").click()
    frame.get_by_text("1 record", exact=True).wait_for()
    frame.locator("a.key", has_text="prefixed/one").click()
    frame.get_by_text("Nobody knows whether it happened").first.wait_for()
    frame.get_by_role("button", name="Resolve …").click()
    dialog = frame.get_by_role("dialog")
    dialog.get_by_label("It happened").check()
    dialog.get_by_label("Reason").fill("seen in the vendor's portal")
    dialog.get_by_role("button", name="Resolve", exact=True).click()
    frame.locator(".title .badge.done").wait_for()
    assert state_of(ledger, record_id) is State.DONE
    assert all(urllib.parse.urlsplit(one.url).path.startswith(f"{PREFIX}/") for one in team.page.frames)


def test_under_a_prefix_the_tabs_show_their_work_and_lead_to_the_ledger_and_back_to_airflow(
    team: Page, paged: str
) -> None:
    for host in ("/dags/paging", f"/dags/paging/runs/{paged}", "/dags/paging/tasks/single"):
        tab = {"paging": "dag", paged: "run", "single": "task"}[host.rsplit("/", 1)[1]]
        frame = team.open(host=f"{host}/plugin/runguard-{tab}")
        frame.locator("a.key", has_text=f"single/{paged}").wait_for()
    frame = team.open(host=f"/dags/paging/runs/{paged}/tasks/mapped/mapped/1/plugin/runguard-ti")
    frame.get_by_text(f"mapped/{paged}/bert").first.wait_for()
    frame.get_by_role("link", name="Open in the ledger").click()
    team.page.wait_for_url(re.compile(f"{PREFIX}/plugin/runguard/.*view=record"))
    frame = team.frame()
    frame.get_by_text(f"mapped/{paged}/bert").first.wait_for()
    frame.get_by_role("link", name="Task instance").click()
    team.page.wait_for_url(re.compile(f"{PREFIX}/dags/paging/runs/{paged}/tasks/mapped/mapped/1"))


def test_the_health_page_says_how_far_the_clocks_are_apart(page: Page, team: Page) -> None:
    frame = page.open("?view=health")
    row = frame.locator("tr", has=frame.get_by_role("rowheader", name="clock"))
    row.get_by_text("Times in logs and in the ledger can be compared.").wait_for()
    assert re.search(r"This machine is (less than 0\.1|\d+\.\d) s (behind|ahead of) the ledger", row.inner_text())
    assert row.locator(".badge").inner_text() == "ok"
    frame = team.open("?view=health")
    row = frame.locator("tr", has=frame.get_by_role("rowheader", name="clock"))
    row.get_by_text("Synchronise both clocks").wait_for()
    assert re.search(r"This machine is 9\d\.\d s ahead of the ledger", row.inner_text())
    assert row.locator(".badge").inner_text() == "warn"


def test_the_links_of_a_record_lead_to_its_task_instance_its_log_and_its_run_and_it_says_where_airflow_disagrees(
    page: Page, ground: Ground, ledger: Ledger, paged: str
) -> None:
    record_id = record_of(ledger, f"single/{paged}")
    run = f"{page.url}/dags/paging/runs/{paged}"
    for name, place, seen in (
        ("Task instance", f"{run}/tasks/single", "single"),
        ("Log", f"{run}/tasks/single?try_number=1", "Done"),
        ("Run", run, paged),
    ):
        frame = page.open(f"?view=record&id={record_id}")
        frame.get_by_role("link", name=name, exact=True).click()
        page.page.wait_for_url(place)
        page.page.get_by_text(seen).first.wait_for()
    ground.airflow.api.set_state("paging", paged, "single", "failed")
    frame = page.open(f"?view=record&id={record_id}")
    frame.get_by_text("Airflow and the ledger disagree").wait_for()
    frame.get_by_text("it gives the stored result back and calls nothing").wait_for()


def test_a_doubt_is_found_and_resolved_by_keyboard_alone(page: Page, ledger: Ledger) -> None:
    record_id = doubtful(ledger, "typed/one")
    doubtful(ledger, "typed/two")
    keyboard = page.page.keyboard

    def reach(element: Any) -> None:
        """By Tab, as far as it takes; and it can be seen where one is."""
        passed = []
        while not element.evaluate("(one) => one === document.activeElement && document.hasFocus()"):
            keyboard.press("Tab")
            passed.append(1)
            assert len(passed) < 100, f"{element} is not reached by Tab"
        assert element.evaluate(OUTLINED), f"{element} does not show that it has the focus"

    page.page.goto(f"{page.url}/")
    entry = page.page.get_by_role("link", name="Ledger")
    entry.wait_for()
    entry.focus()
    keyboard.press("Enter")
    frame = page.frame()
    reach(frame.locator("a.figure", has_text="In doubt"))
    keyboard.press("Enter")
    prefix = frame.get_by_label("Key begins with")
    prefix.wait_for()
    reach(prefix)
    keyboard.type("typed/")
    keyboard.press("Enter")
    frame.get_by_text("2 records", exact=True).wait_for()
    reach(frame.locator("a.key", has_text="typed/one"))
    keyboard.press("Enter")
    resolve = frame.get_by_role("button", name="Resolve …")
    resolve.wait_for()
    reach(resolve)
    keyboard.press("Enter")
    dialog = frame.get_by_role("dialog")
    dialog.wait_for()
    keyboard.press("Space")
    reach(dialog.get_by_label("Result, as JSON"))
    keyboard.type('"ch_typed"')
    reach(dialog.get_by_label("Reason"))
    keyboard.type("seen in the portal")
    reach(dialog.get_by_role("button", name="Resolve", exact=True))
    keyboard.press("Enter")
    frame.locator(".title .badge.done").wait_for()
    assert state_of(ledger, record_id) is State.DONE
    reach(frame.get_by_role("button", name="Reopen …"))
    keyboard.press("Enter")
    dialog.wait_for()
    keyboard.press("Escape")
    dialog.wait_for(state="detached")
    reach(frame.get_by_role("button", name="Reopen …"))
