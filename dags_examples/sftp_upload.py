"""Files to a partner's SFTP inbox: each arrives once and whole, and after an accident the inbox itself is asked.

A file is written under another name and renamed: under its own name it is there whole or not at all, so that finding it
is proof. (A partner who removes what was fetched makes "not there" no proof: leave ``on_doubt`` out then, and a person
is asked.) Reads the Connection ``partner`` (type sftp).
"""

import pendulum
from airflow.providers.sftp.hooks.sftp import SFTPHook
from airflow.sdk import dag, task

from airflow_runguard import guarded_batch_task
from airflow_runguard.reconcilers import SftpLookup


@dag(schedule="@daily", start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), catchup=False)
def sftp_upload():
    @task
    def reports(ds: str | None = None) -> list[dict]:
        return [{"name": f"{ds}-{kind}.csv", "text": f"{kind};{ds}\n"} for kind in ("orders", "returns")]

    @guarded_batch_task(
        key="reports/{{ ds }}", item_key="name", on_doubt=SftpLookup("partner", "/inbox/{intent[name]}")
    )
    def upload(report: dict) -> str:
        path = f"/inbox/{report['name']}"
        with SFTPHook(ssh_conn_id="partner").get_managed_conn() as sftp:
            with sftp.open(f"{path}.part", "w") as file:
                file.write(report["text"])
            sftp.rename(f"{path}.part", path)
        return path

    upload(reports())


sftp_upload()
