"""The API attacked by its own description: whatever it is asked, it answers as it says that it does."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import State
from tests.ui.conftest import Api, put

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FEW = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(600)
def test_whatever_the_api_is_asked_it_answers_as_it_is_described(api: Api, ledger: Ledger) -> None:
    for number, state in enumerate((State.IN_DOUBT, State.PAUSED, State.DONE, State.FAILED)):
        put(ledger, f"invoice/{number}", state)
    headers = api.as_("ann").headers
    schema = schemathesis.openapi.from_asgi("/api/openapi.json", api.app, headers=headers)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 20
    answered: set[int] = set()
    for operation in operations:

        @FEW
        @given(case=operation.as_strategy())
        def attack(case: schemathesis.Case) -> None:
            answer = case.call(headers=headers)
            answered.add(answer.status_code)
            case.validate_response(answer, checks=CHECKS)

        attack()
    assert {200, 404, 409, 422} <= answered
