"""``python -m demo pictures``: the pictures of the README, of a ledger after real accidents.

The guarded DAG alone, before anybody has answered: some invoices are paid in spite of an accident, two are in doubt and
ask a person, one waits for its quota, one is under way. Nothing on the pictures was written into the ledger by hand.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo.accidents import exception_after_the_charge, finished_run_cleared, run_again_by_hand
from demo.drive import GUARDED, PATIENCE, Drive, NotDriven
from demo.ground import Ground
from demo.stack import PASSWORD, USER

AT_ONCE = 3
"""Accidents at the same time; nobody compares their times here."""
SIZE = {"width": 1180, "height": 860}
WALL = 3600
"""Seconds for which the vendor has enough: longer than it takes to look at it."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync --no-proxy-server"


def killed_and_asked(drive: Drive) -> None:
    run_id = drive.start_held()
    drive.processes(run_id).task.kill()
    _asked(drive, run_id)


def timed_out_and_asked(drive: Drive) -> None:
    _asked(drive, drive.start_held(patience=2))


def waits_for_its_quota(drive: Drive) -> None:
    drive.vendor.script("wall", customer=drive.customer, seconds=WALL)
    drive.wait_until_it_waits(drive.start(account=drive.invoice))


def under_way(drive: Drive) -> None:
    drive.start_held()


def _asked(drive: Drive, run_id: str) -> None:
    state = drive.ended_or_asked(run_id)
    if state != "awaiting_input":
        raise NotDriven(f"Run {run_id} asks nobody: {state}.")


ACCIDENTS: dict[str, Callable[[Drive], None]] = {
    "2026-10-cust-1": exception_after_the_charge,
    "2026-10-cust-2": finished_run_cleared,
    "2026-10-cust-3": run_again_by_hand,
    "2026-10-cust-4": waits_for_its_quota,
    "2026-10-cust-5": timed_out_and_asked,
    "2026-10-cust-6": killed_and_asked,
    "2026-10-cust-7": under_way,
}
SHOWN = "2026-10-cust-6"


def drive(ground: Ground, say: Callable[[str], None]) -> None:
    """All of them, a few at once; the last one to begin is still under way when this returns."""
    ground.control.honour_keys(False)
    ground.airflow.api.wait_dag(GUARDED, PATIENCE)
    ground.airflow.api.unpause(GUARDED)
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def one(invoice: str) -> None:
            ACCIDENTS[invoice](Drive(ground, GUARDED, [invoice], lambda line: say(f"{invoice}: {line}")))

        for ended in [pool.submit(one, invoice) for invoice in ACCIDENTS]:
            ended.result()


@contextmanager
def looking(ground: Ground, theme: str, size: Any = None) -> Iterator[Callable[[str, Path], None]]:
    """Takes pictures of the ledger's page in Airflow's, by its place (``?view=…``), as the administrator sees it."""
    from playwright.sync_api import sync_playwright

    chromium = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if chromium is None:
        raise RuntimeError("The pictures are taken in Chromium, which is not installed: apt-get install chromium")
    login = {"username": USER, "password": PASSWORD}
    token = ground.airflow.api.call("POST", "/auth/token", login, login=False)["access_token"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS.split())
        context = browser.new_context(viewport=size or SIZE)
        context.add_cookies([{"name": "_token", "value": token, "url": ground.airflow.url}])
        context.add_init_script(f"localStorage.setItem('theme', '{theme}')")
        page = context.new_page()
        page.set_default_timeout(PATIENCE * 1000)

        def take(place: str, target: Path) -> None:
            page.goto(f"{ground.airflow.url}/plugin/runguard/runguard/ui/{place}")
            page.frame_locator('iframe[title="Ledger"]').locator("body[data-ready]").wait_for()
            page.wait_for_function("[...document.images].every((image) => image.complete)")  # the pages ask for ever
            page.screenshot(path=target)

        yield take
        browser.close()


def take_all(ground: Ground, folder: Path) -> None:
    shown = Drive(ground, GUARDED, [SHOWN], lambda _: None).explain()["record"]["id"]
    with looking(ground, "light") as take:
        take("?view=overview", folder / "overview.png")
    with looking(ground, "dark") as take:
        take(f"?view=record&id={shown}", folder / "record.png")
