"""What Airflow is told about the package: read on every start of its command line, so it must be cheap and right."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import airflow
import jsonschema

from airflow_runguard.provider_info import get_provider_info

INFO = get_provider_info()
OPTIONS = INFO["config"]["runguard"]["options"]


def test_it_fits_airflows_schema():
    schema = json.loads((Path(airflow.__path__[0]) / "provider_info.schema.json").read_text())
    jsonschema.validate(INFO, schema)


def test_it_names_the_distribution_as_it_is_named():
    """Another name makes Airflow's discovery raise, in every process."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert INFO["package-name"] == project["name"]
    assert INFO["versions"] == [project["version"]]


def test_every_default_is_a_text_of_its_type():
    reads = {"string": str, "integer": int, "float": float, "boolean": {"true": True, "false": False}.__getitem__}
    for name, option in OPTIONS.items():
        assert isinstance(option["default"], str), name
        reads[option["type"]](option["default"])
        reads[option["type"]](option["example"])
        assert option["example"] != option["default"], name


def test_reading_it_imports_nothing_of_airflow_and_no_driver():
    program = (
        "import sys; from airflow_runguard.provider_info import get_provider_info; get_provider_info(); "
        "print(*{'airflow', 'psycopg', 'redis', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == []
