"""``docker-compose.yaml`` without Docker: its shape, its commands and its settings are held against the real things."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import psycopg
import pytest
import yaml

from demo.servers import Postgres

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SCHEMA = json.loads((Path(__file__).parent / "data/compose-spec.json").read_text())


def _airflow_commands() -> list[list[str]]:
    """The ``airflow …`` lines that the containers run: as their command, in a shell, and as their health check."""
    found = []
    for service in SERVICES.values():
        if service.get("image") != "airflow-runguard:local":
            continue
        for words in (service["command"], service.get("healthcheck", {}).get("test", [])):
            if words[:2] == ["bash", "-c"] or words[:1] == ["CMD-SHELL"]:
                found += [shlex.split(part)[1:] for part in words[-1].replace("$$", "").split("&&")]
            elif words[:1] not in (["CMD"], []):
                found.append(words)  # the image's entry point puts ``airflow`` before it
    return found


def test_the_file_fits_the_schema_of_compose_files():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(COMPOSE)


def test_the_schema_refuses_a_wrong_file():
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(COMPOSE | {"services": {"redis": {"imagge": "redis:7"}}})


def test_every_part_that_a_service_names_is_there():
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        for name, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[name]
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).is_dir()
        for config in service.get("configs", []):
            assert config["source"] in COMPOSE["configs"]


def test_all_of_airflows_processes_are_there():
    commands = _airflow_commands()
    for process in ("api-server", "scheduler", "dag-processor", "triggerer"):
        assert [process] in commands
    assert ["db", "migrate"] in commands
    assert ["runguard", "db", "upgrade"] in commands


_IN_AIRFLOW = """
import json, sys
from airflow.cli import cli_parser
from airflow.configuration import conf
from airflow.providers_manager import ProvidersManager
asked = json.load(sys.stdin)
ProvidersManager().initialize_providers_configuration()
known = conf.configuration_description
wrong = [[part, name] for part, name in asked["options"] if name not in known.get(part, {}).get("options", {})]
parser = cli_parser.get_parser()
for words in asked["commands"]:
    try:
        assert callable(parser.parse_args(words).func)
    except (SystemExit, AttributeError):
        wrong.append(words)
print(json.dumps(wrong))
"""


def test_every_airflow_command_and_option_is_one_that_airflow_knows(tmp_path):
    environment = SERVICES["scheduler"]["environment"]
    options = [name.lower().split("__")[1:] for name in environment if name.startswith("AIRFLOW__")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IN_AIRFLOW],
        input=json.dumps({"options": options, "commands": _airflow_commands()}),
        env=os.environ | {"AIRFLOW_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr


def test_the_images_airflow_is_the_one_that_the_tests_run_on():
    recipe = SERVICES["scheduler"]["build"]["dockerfile_inline"]
    pinned = re.search(r"^apache-airflow==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert set(re.findall(r"apache/airflow:(\S+)|apache-airflow==([^\s\"]+)", recipe)) == {
        (pinned[1], ""),
        ("", pinned[1]),
    }
    for source in re.findall(r"COPY \S+ (.+) \S+$", recipe, re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split())


def test_the_ledgers_database_is_made_for_its_own_role_and_its_connection_reaches_it(tmp_path):
    ledger = urlsplit(SERVICES["scheduler"]["environment"]["AIRFLOW_CONN_RUNGUARD_LEDGER"])
    assert ledger.hostname in SERVICES
    with Postgres(tmp_path) as server:
        with psycopg.connect(server.url, autocommit=True) as admin:
            for statement in COMPOSE["configs"]["ledger"]["content"].split(";"):
                admin.execute(statement)
            admin.execute("CREATE ROLE stranger LOGIN")
        here = urlsplit(server.url)
        url = ledger._replace(netloc=f"{ledger.username}:{ledger.password}@{here.hostname}:{here.port}").geturl()
        with psycopg.connect(url) as session:
            session.execute("CREATE SCHEMA runguard")
        with pytest.raises(psycopg.OperationalError, match="permission denied"):
            psycopg.connect(url.replace(f"{ledger.username}:{ledger.password}@", "stranger@"))


def test_redis_evicts_nothing_and_the_lease_reaches_it():
    assert urlsplit(SERVICES["scheduler"]["environment"]["AIRFLOW_CONN_RUNGUARD_REDIS"]).hostname in SERVICES
    command = SERVICES["redis"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
