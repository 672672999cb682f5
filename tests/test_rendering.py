"""Every expression of a key must come to something: what is missing is refused by name and never becomes a text."""

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import jinja2
import pendulum
import pytest
from airflow.sdk.definitions._internal.templater import NativeEnvironment, SandboxedEnvironment

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.rendering import render_key

NOON = datetime(2026, 10, 1, 12, tzinfo=UTC)


class Size(Enum):
    SMALL = "s"


class Run:
    """What a template sees of a DAG run."""

    def __init__(self, conf: dict[str, Any] | None) -> None:
        self.conf = conf
        self.logical_date = None


CONTEXT: dict[str, Any] = {
    "args": {"invoice": {"id": 7, "to": None, "lines": ["a", None], "rate": 0.5}},
    "params": {"account": None, "empty": "", "blank": "  ", "shop": "eu"},
    "dag_run": Run(conf={}),
    "bare_run": Run(conf=None),
    "ds": "2026-10-01",
    "at": NOON,
    "thing": object(),
}


@pytest.fixture(params=[None, SandboxedEnvironment, NativeEnvironment], ids=["plain", "sandboxed", "native"])
def env(request: pytest.FixtureRequest) -> jinja2.Environment | None:
    """The environments that Airflow renders with; a key is the same text in each."""
    return request.param() if request.param else None


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("monthly-report", "monthly-report"),
        ("invoice/{{ args.invoice.id }}", "invoice/7"),
        ("{{ args.invoice.id }}", "7"),
        ("{{ '0017' }}", "0017"),
        ("{{ ds }}/{{ params.shop | upper }}", "2026-10-01/EU"),
        ("{{ params['shop'] ~ '-' ~ args.invoice.id }}", "eu-7"),
        ("{{ '%s-%s' % (params.shop, ds) }}", "eu-2026-10-01"),
        ("{{ dag_run.conf.x | default('none') }}", "none"),
        ("{{ params.account | default('house', true) }}", "house"),
        ("{{ params.account or 'house' }}", "house"),
        ("{{ 'house' if params.account is none else params.account }}", "house"),
        ("{% if params.account %}{{ params.account }}{% else %}house{% endif %}", "house"),
        ("{% for x in [1, 2] %}{{ x }}-{% endfor %}end", "1-2-end"),
        ("{% raw %}{{ x }}{% endraw %}{{ ds }}", "{{ x }}2026-10-01"),
        ("{{ 0 }}{{ false }}", "0False"),
        ("a&b/{{ '<' }}", "a&b/<"),
    ],
)
def test_a_key_is_rendered_to_its_text(env, template, text):
    assert render_key(template, CONTEXT, env=env) == text


@pytest.mark.parametrize(
    ("template", "name", "fault"),
    [
        ("p/{{ params.account }}", "params.account", "is None"),
        ("p/{{ args.invoice.to }}", "args.invoice.to", "is None"),
        ("p/{{ dag_run.conf.x }}", "dag_run.conf.x", "is undefined"),
        ("p/{{ dag_run.conf['x'] }}", "dag_run.conf['x']", "is undefined"),
        ("p/{{ bare_run.conf.x }}", "bare_run.conf.x", "is undefined"),
        ("p/{{ bare_run.conf.x.y.z }}", "bare_run.conf.x.y.z", "is undefined"),
        ("p/{{ dag_run.logical_date }}", "dag_run.logical_date", "is None"),
        ("p/{{ nothing }}", "nothing", "is undefined"),
        ("{{ ds }}/{{ nothing.at.all }}", "nothing.at.all", "is undefined"),
        ("p/{{ 'x' if ds == 'y' }}", "'x' if ds == 'y'", "is undefined"),
        ("p/{{ params.empty }}", "params.empty", "is empty"),
        ("p/{{ params.blank }}", "params.blank", "is empty"),
        ("p/{{ '' }}", "''", "is empty"),
        ("p/{{ none }}", "none", "is None"),
        ("p/{{ params.account | upper }}", "params.account | upper", "None or undefined"),
        ("p/{{ params.account | default('x') | upper }}", "params.account | default('x') | upper", "None or undefined"),
        ("p/{{ nothing | string }}", "nothing | string", "None or undefined"),
        ("p/{{ 'a' ~ params.account }}", "'a' ~ params.account", "None or undefined"),
        ("p/{{ '%s' % params.account }}", "'%s' % params.account", "None or undefined"),
        ("p/{{ '{}'.format(params.account) }}", "'{}'.format(params.account)", "None or undefined"),
        ("p/{{ '{a}'.format(a=params.account) }}", "'{a}'.format(a=params.account)", "None or undefined"),
        ("p/{{ args.invoice.lines | join('-') }}", "args.invoice.lines | join('-')", "None or undefined"),
        ("p/{{ [params.account, 'b'] | join }}", "[params.account, 'b'] | join", "None or undefined"),
        ("p/{{ args.invoice }}", "args.invoice", "is a dict"),
        ("p/{{ args.invoice.lines }}", "args.invoice.lines", "is a list"),
        ("p/{{ args.invoice.rate }}", "args.invoice.rate", "is a float"),
        ("p/{{ thing }}", "thing", "is a object"),
        ("p/{{ thing | string }}", "thing | string", "an address in this process's memory"),
        ("{% for x in [1, none] %}{{ x }}{% endfor %}", "x", "is None"),
        ("{% if true %}{{ ds }}{% else %}{{ nope }}{% endif %}{{ nothing }}", "nothing", "is undefined"),
        ("{% raw %}{{ a }}{% endraw %}{{ nothing }}", "nothing", "is undefined"),
        ("{% set x %}{{ params.account }}{% endset %}{{ x }}", "params.account", "is None"),
    ],
)
def test_an_expression_that_comes_to_nothing_is_refused_by_its_name(env, template, name, fault):
    with pytest.raises(PlanningError) as caught:
        render_key(template, CONTEXT, env=env)
    assert f"{{{{ {name} }}}} " in caught.value.what
    assert fault in caught.value.what


@pytest.mark.parametrize(
    "template",
    [
        "p/{{ ds",
        "p/{{ ds | no_such_filter }}",
        "p/{% if x %}",
        "p/{{ params.account + 'a' }}",
        "p/{{ nothing + 'a' }}",
        "p/{{ ds.no_method() }}",
        "p/{{ 1 / 0 }}",
        "p/{% if nothing %}a{% endif %}",
        "p/{% for x in nothing %}{% endfor %}",
    ],
)
def test_a_template_that_cannot_be_rendered_is_refused_with_its_text(env, template):
    with pytest.raises(PlanningError) as caught:
        render_key(template, CONTEXT, env=env)
    assert repr(template) in str(caught.value)


def test_a_moment_is_the_same_key_in_every_zone(env):
    tokyo = pendulum.instance(NOON).in_timezone("Asia/Tokyo")
    zones: list[Any] = [NOON, NOON.astimezone(timezone(timedelta(hours=2))), tokyo]
    assert {render_key("x/{{ at }}", {"at": at}, env=env) for at in zones} == {"x/2026-10-01T12:00:00Z"}


def test_scalars_have_one_text_for_one_value(env):
    def text(value: object) -> str:
        return render_key("{{ v }}", {"v": value}, env=env)

    assert text(Decimal("1.50")) == text(Decimal("1.5")) == "1.5"
    assert text(date(2026, 10, 1)) == "2026-10-01"
    assert text(UUID(int=1)) == "00000000-0000-0000-0000-000000000001"
    assert text(Size.SMALL) == "s"
    for refused in (Decimal("NaN"), b"bytes", (1, 2)):
        with pytest.raises(PlanningError, match="is a"):
            text(refused)


def test_the_dags_own_filters_work_and_its_environment_is_left_as_it_was():
    env = SandboxedEnvironment()
    env.filters["short"] = lambda text: text[:4]
    before = dict(env.filters)
    assert render_key("{{ ds | short }}", CONTEXT, env=env) == "2026"
    assert env.filters == before
    assert env.from_string("{{ nothing }}").render() == ""


def test_a_callable_is_given_the_arguments(env):
    assert render_key(lambda args: f"invoice/{args['invoice']['id']}", CONTEXT, env=env) == "invoice/7"


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        (lambda args: None, "is None"),
        (lambda args: "", "is empty"),
        (lambda args: args["invoice"], "is a dict"),
        (lambda args: repr(CONTEXT["thing"]), "an address"),
        (lambda args: args["no"], "raised KeyError"),
    ],
)
def test_a_callable_that_comes_to_nothing_is_refused(key, fault):
    with pytest.raises(PlanningError, match=fault) as caught:
        render_key(key, CONTEXT)
    assert "<lambda>" in str(caught.value)


def test_an_outage_behind_an_expression_is_not_blamed_on_the_key():
    """A Variable's store that is out of reach makes the try fail and be repeated; a planning failure would not be."""

    def unreachable() -> str:
        raise ConnectionError("no answer")

    with pytest.raises(ConnectionError):
        render_key("{{ var() }}", {"var": unreachable})
