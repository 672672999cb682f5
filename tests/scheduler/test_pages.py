"""The pages in a real browser, inside a running Airflow: what people see, and what happens when they press a button."""

from __future__ import annotations

import urllib.parse
from dataclasses import replace
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from airflow_runguard.core import keys
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import State
from demo.drive import PATIENCE, TASK
from demo.ground import DEPLOYMENT, Ground
from demo.stack import USER, VIEWER
from tests.core import batches, books, engine
from tests.scheduler.looking import HOSTILE, Page, doubtful
from tests.scheduler.test_asking import Asked

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(900)]

CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour[3] > 250) return colour;
    }
    return rgb(getComputedStyle(document.documentElement).backgroundColor);
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data.trim()).join("");
    if (!text || !element.getClientRects().length) continue;
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
"""What of a page has less than 4.5:1 (WCAG AA)."""

NUMBERS = """() => [...document.querySelectorAll("main *:not(title)")].flatMap((one) => {
  if (one.childElementCount) return [];
  const found = /^((?:[A-Z]{3} )?[\\d,.]+)(?: waiting)?$/.exec(one.textContent.trim());
  return found ? [[found[1].replaceAll(",", ""), one.closest("a")?.getAttribute("href") ?? null]] : [];
})"""
"""All numbers and amounts of the page, with where they lead."""


# -- looking -----------------------------------------------------------------------------------------------------------


def test_each_number_of_the_overview_is_a_link_to_a_list_of_as_many(page: Page, ledger: Ledger, paged: str) -> None:
    for cents in (10, 25):
        doubtful(ledger, f"overview/{cents}", amount=Decimal(cents) / 100, currency="CHF")
    for state, failure in ((State.DONE, None), (State.FAILED, books.DECLINED), (State.PAUSED, books.QUOTA)):
        what = replace(engine.order(f"overview/{state.value}"), gate="overview")
        what = replace(what, identity=keys.identity(DEPLOYMENT, "pages", what.identity.key))
        books.enter(ledger, what, engine.holder(dag_id="paging")).settle(state, failure)
        if state is State.DONE:
            ledger.count_replay(what.identity)
    page.open()
    frame = page.page.frames[-1]
    overview = frame.url

    def told() -> dict[str, set[str]]:
        frame.goto(overview)
        frame.locator("figcaption").first.wait_for()
        found: dict[str, set[str]] = {}
        for text, link in frame.evaluate(NUMBERS):
            assert link, f"{text} is no link"
            found.setdefault(link, set()).add(text)
        return found

    def listed(link: str) -> str:
        query = f"?{urllib.parse.urlsplit(link).query}".replace("?view=records&", "../api/records/export?format=json&")
        found = frame.evaluate("(list) => fetch(list).then((answer) => answer.json())", query)
        if "currency=" not in link:
            return str(len(found))
        return f"{found[0]['currency']} {sum(Decimal(one['amount']) for one in found)}"

    for _ in range(5):  # other tests' tasks go on meanwhile
        before = told()
        lists = {link: {listed(link)} for link in before if "view=records" in link}
        if told() == before:
            break
    assert {link: texts for link, texts in before.items() if "view=records" in link} == lists
    kinds = (
        "state=done&since=",
        "failure_class=quota",
        "prevented=replay",
        "gate=overview&waiting",
        "needs_person=true",
    )
    assert [kind for kind in kinds if not any(kind in link for link in lists)] == []
    for part in ("prevented=doubt", "currency=CHF", "state=in_doubt&state=failed&state=paused", "gates"):
        for _ in range(5):
            link, texts = next((link, texts) for link, texts in told().items() if part in link)
            frame.locator(f'main a[href="{link}"]').first.click()
            rows = frame.locator("table.list, table.gates").first.locator("tbody tr")
            rows.first.wait_for()
            asked = 2 if "currency=" in link else int(*texts)
            if agree := rows.count() == asked or 50 <= rows.count() < asked:
                break
        assert agree, f"{link}: {rows.count()} of {asked}"


def test_a_filter_leads_to_its_records_and_can_be_shared_as_a_link(page: Page, ledger: Ledger, paged: str) -> None:
    doubtful(ledger, "filtered/one")
    frame = page.open("?view=records")
    frame.get_by_label("Key begins with").fill("filtered/")
    frame.get_by_role("button", name="Filter").click()
    frame.get_by_text("1 record", exact=True).wait_for()
    frame.locator("a.key", has_text="filtered/one").wait_for()
    page.page.evaluate("localStorage.setItem('timezone', JSON.stringify('Asia/Tokyo'))")
    frame = page.open("?view=records&key_prefix=filtered%2F&state=done")
    frame.get_by_text("No record fits.").wait_for()
    frame = page.open("?view=records&key_prefix=filtered%2F")
    changed = frame.locator("table.list time").first
    assert changed.inner_text().endswith((" ago", "now"))
    assert "(Asia/Tokyo)" in changed.get_attribute("title")
    frame.get_by_label("Key begins with").fill(f"single/{paged}")
    frame.get_by_role("button", name="Filter").click()
    frame.locator("a.key", has_text=f"single/{paged}").click()
    finished = frame.locator("dt:text-is('Finished') + dd .muted").inner_text()
    booked = next(record.finished_at for record in ledger.list(limit=1_000) if record.identity.key == f"single/{paged}")
    assert finished == f"{booked.astimezone(ZoneInfo('Asia/Tokyo')):%Y-%m-%d %H:%M:%S}"
    assert f"booked at {finished} (" in frame.locator(".why").inner_text(), "the sentences too"


def test_new_records_are_announced_and_changed_ones_change_where_they_stand(page: Page, ledger: Ledger) -> None:
    first = doubtful(ledger, "live/one")
    frame = page.open("?view=records&namespace=pages")
    frame.locator("tr", has_text="live/one").get_by_text("in doubt").wait_for()
    doubtful(ledger, "live/two")
    ledger.resolve(first, "happened", actor="person:other", reason="seen", result=b"1")
    frame.get_by_role("button", name="new").wait_for()
    frame.locator("tr", has_text="live/one").get_by_text("done").wait_for()
    assert frame.locator("a.key", has_text="live/two").count() == 0


@pytest.mark.parametrize(("where", "key"), [("", "single/"), ("/mapped/1", "mapped/")], ids=["unmapped", "mapped"])
def test_the_tab_of_a_task_instance_shows_its_work(page: Page, paged: str, where: str, key: str) -> None:
    task = "mapped" if where else "single"
    frame = page.open(host=f"/dags/paging/runs/{paged}/tasks/{task}{where}/plugin/runguard-ti")
    heading = frame.get_by_role("heading", level=1)
    heading.wait_for()
    expected = f"{key}{paged}" + ("/bert" if where else "")
    frame.get_by_text(expected).first.wait_for()
    assert frame.get_by_text("/anna").count() == 0


def test_the_tabs_of_a_run_a_task_and_a_dag_show_theirs(page: Page, paged: str) -> None:
    for host in (f"/dags/paging/runs/{paged}/plugin/runguard-run", "/dags/paging/plugin/runguard-dag"):
        frame = page.open(host=host)
        frame.locator("a.key", has_text=f"single/{paged}").wait_for()
        frame.locator("a.key", has_text=f"mapped/{paged}/anna").wait_for()
    frame = page.open(host="/dags/paging/tasks/mapped/plugin/runguard-task")
    frame.locator("a.key", has_text=f"mapped/{paged}/anna").wait_for()
    assert frame.locator("a.key", has_text="single/").count() == 0


def test_nothing_in_the_ledger_becomes_markup(page: Page, ledger: Ledger) -> None:
    record_id = doubtful(ledger, f"hostile/{HOSTILE}")
    for place in ("?view=overview", "?view=records&namespace=pages", f"?view=record&id={record_id}"):
        frame = page.open(place)
        frame.get_by_text(HOSTILE).first.wait_for()
        assert frame.locator("main img, main script").count() == 0
    assert page.page.evaluate("window.hacked") is None


def test_the_colours_follow_airflow_at_once_and_all_text_can_be_read(
    browser: Any, ground: Ground, ledger: Ledger
) -> None:
    record_id = doubtful(ledger, "colours")
    page = Page(browser, ground.airflow.url, USER, width=1024)
    dialogs = {f"?view=record&id={record_id}": "Resolve …", "?view=gates": "Freeze …"}
    for place in ("?view=overview", "?view=records", *dialogs, "?view=health"):
        frame = page.open(place)
        inner = page.page.frames[-1]
        if place in dialogs:
            frame.get_by_role("button", name=dialogs[place]).first.click()
            frame.get_by_role("dialog").wait_for()
        grounds = {}
        for theme in ("light", "dark"):
            other = "dark" if theme == "light" else "light"
            page.page.evaluate(f"document.documentElement.classList.replace('{other}', '{theme}')")
            frame.locator("html.dark" if theme == "dark" else "html:not(.dark)").wait_for(state="attached")
            grounds[theme] = inner.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            assert inner.evaluate(CONTRAST) == [], (place, theme)
        assert grounds["light"] != grounds["dark"]
        width = inner.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert width == 0, f"{place} is wider than its frame"
    page.page.context.close()
    assert page.errors == []


# -- acting ------------------------------------------------------------------------------------------------------------


def test_p13_a_doubt_resolved_on_the_page_lets_the_parked_task_go_on_with_the_result(
    page: Page, ground: Ground
) -> None:
    ground.airflow.api.wait_dag("asking", PATIENCE)
    ground.airflow.api.unpause("asking")
    drive = Asked(ground, "resolved-on-the-page")
    run_id = drive.park()
    record_id = drive.explain()["record"]["id"]
    frame = page.open(f"?view=record&id={record_id}")
    frame.get_by_text("A task is parked in Airflow").wait_for()
    frame.get_by_role("button", name="Resolve …").first.press("Enter")
    dialog = frame.get_by_role("dialog")
    dialog.get_by_label("It happened").check()
    dialog.get_by_label("Result, as JSON").fill('"ch_from_the_page"')
    dialog.get_by_text("never made again").wait_for()
    dialog.get_by_label("Reason").fill("seen in the vendor's portal")
    dialog.get_by_role("button", name="Resolve", exact=True).click()
    frame.get_by_text("seen in the vendor's portal").first.wait_for()
    end = drive.end(run_id)
    assert (end["run"], end["record"], end["charges"], end["requests"]) == ("success", "done", 1, 1)
    assert end["result"] == "ch_from_the_page"
    assert end["actors"][0] == f"person:{USER}"
    logs = drive.api.call("GET", f"/api/v2/eventLogs?event=runguard_resolve&dag_id={drive.dag_id}")["event_logs"]
    assert [(line["owner"], line["run_id"], line["task_id"]) for line in logs] == [(USER, run_id, TASK)]
    frame = page.open(f"?view=record&id={record_id}")
    frame.locator(".title .badge.done").wait_for()
    assert frame.get_by_text("Airflow and the ledger disagree").count() == 0


def test_what_moved_while_the_dialog_was_open_is_refused_in_words(page: Page, ledger: Ledger) -> None:
    record_id = doubtful(ledger, "moved")
    frame = page.open(f"?view=record&id={record_id}")
    frame.get_by_role("button", name="Resolve …").click()
    dialog = frame.get_by_role("dialog")
    dialog.get_by_label("It did not happen").check()
    dialog.get_by_label("Reason").fill("nothing there")
    ledger.resolve(record_id, "happened", actor="person:other", reason="seen", result=b"1")
    dialog.get_by_role("button", name="Resolve", exact=True).click()
    dialog.get_by_role("alert").get_by_text("Nothing was changed").wait_for()
    record = next(r for r in ledger.list(after=record_id - 1, limit=1))
    assert record.state is State.DONE
    dialog.press("Escape")
    frame.locator(".title .badge.done").wait_for()


def test_a_selection_is_resolved_with_one_answer(page: Page, ledger: Ledger) -> None:
    ids = [doubtful(ledger, f"bulk/{number}") for number in range(3)]
    frame = page.open("?view=records&key_prefix=bulk%2F")
    for number in range(2):
        frame.get_by_label(f"Select bulk/{number}").check()
    frame.get_by_role("button", name="Resolve …").click()
    dialog = frame.get_by_role("dialog")
    dialog.get_by_label("Nobody can find out").check()
    dialog.get_by_label("Reason").fill("the vendor has no log of that day")
    dialog.get_by_role("button", name="Resolve", exact=True).click()
    frame.get_by_text("2 resolved.").wait_for()
    states = [next(r.state for r in ledger.list(after=one - 1, limit=1)) for one in ids]
    assert states == [State.FAILED, State.FAILED, State.IN_DOUBT]


def test_chosen_items_of_a_batch_are_reopened_and_the_others_stay(page: Page, ledger: Ledger) -> None:
    what = replace(batches.order(), identity=keys.identity(DEPLOYMENT, "pages", "batch"))
    pay = batches.Counting(**dict.fromkeys("bcd", NotApplied("no such customer")))
    many = [f"x{number:03}" for number in range(300)]
    work = {"holder": engine.holder(dag_id="paging")}
    batches.run(ledger, batches.invoices(*"abcd", *many), pay, what=what, work=work)
    frame = page.open(f"?view=record&id={batches.record(ledger, what).id}")
    frame.get_by_text("200 and more").wait_for()
    assert frame.locator(".inner .call").count() < 60, "only what is in sight is drawn"
    frame.get_by_role("button", name="Copy rg1-").first.click()
    frame.get_by_text("Copied.").wait_for()
    for item in "bc":
        frame.get_by_label(f"Select {item}", exact=True).check()
    frame.get_by_role("button", name="Reopen 2 selected …").click()
    dialog = frame.get_by_role("dialog")
    dialog.get_by_text("under a new vendor key").wait_for()
    dialog.get_by_label("Reason").fill("the customers are there now")
    dialog.get_by_role("button", name="Order anew").click()
    frame.get_by_text("ordered 2 item(s) anew (b, c)").first.wait_for()
    frame.locator(".call", has_text="pending").nth(1).wait_for()
    states = batches.states(ledger, what)
    assert [states[item] for item in "abcd"] == ["done", "pending", "pending", "failed"]


def test_a_gate_is_closed_and_opened_with_a_reason(page: Page, ledger: Ledger) -> None:
    frame = page.open("?view=gates")
    frame.get_by_role("button", name="Close a gate …").click()
    dialog = frame.get_by_role("dialog")
    dialog.get_by_label("Gate", exact=True).fill("gate-of-pages")
    dialog.get_by_label("Reason").fill("announced maintenance")
    dialog.get_by_role("button", name="Close it").click()
    row = frame.locator("tr", has_text="gate-of-pages")
    row.get_by_text("closed", exact=True).wait_for()
    row.get_by_role("button", name="Open …").click()
    frame.get_by_role("dialog").get_by_label("Reason").fill("over")
    frame.get_by_role("button", name="Open it").click()
    row.get_by_text("open", exact=True).wait_for()
    assert [gate["actor"] for gate in ledger.gates("gate-of-pages")] == [f"person:{USER}"]


def test_a_viewer_has_no_buttons_that_change_something(browser: Any, ground: Ground, ledger: Ledger) -> None:
    record_id = doubtful(ledger, "viewed")
    page = Page(browser, ground.airflow.url, VIEWER)
    frame = page.open(f"?view=record&id={record_id}")
    frame.get_by_text("Nobody knows whether it happened").first.wait_for()
    frame.get_by_text("Airflow has no such task instance any more").wait_for()
    assert frame.locator("button", has_text="…").count() == 0
    for place in ("?view=records&namespace=pages", "?view=gates"):
        frame = page.open(place)
        assert frame.locator("button", has_text="…").count() == 0
        assert frame.locator("td input[type=checkbox]").count() == 0
    page.page.context.close()
    assert page.errors == []
