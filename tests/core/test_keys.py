"""Names, orders and vendor keys: equal data is one, different data is two, and the rest is refused before any call."""

import hashlib
import json
import os
import string
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal, localcontext
from enum import Enum, IntEnum, StrEnum
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Self
from uuid import UUID
from zoneinfo import ZoneInfo

import pendulum
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_runguard.core import keys, payloads
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.record import MAX_KEY_LENGTH, Identity

BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 10, 1, 12, tzinfo=UTC)
ME = keys.identity("default", "billing", "invoice/7")


class Size(Enum):
    SMALL = 1


class Level(IntEnum):
    LOW = 1


class Currency(StrEnum):
    EUR = "eur"


@dataclass
class Line:
    item: str
    price: Decimal


class Model(pydantic.BaseModel):
    item: str
    price: Decimal


class Lane(StrEnum):
    """Its text is not its value."""

    FAST = ("x", "fast")

    def __new__(cls, text: str, value: str) -> Self:
        member = str.__new__(cls, text)
        member._value_ = value
        return member


# --- identity ---------------------------------------------------------------------------------------------------------


def test_an_identity_keeps_its_parts_as_they_are():
    assert keys.identity("default", "billing", "Rechnung/é 7") == Identity("default", "billing", "Rechnung/é 7")
    assert keys.identity("d", "n", "k" * MAX_KEY_LENGTH).key == "k" * MAX_KEY_LENGTH


@pytest.mark.parametrize("name", ["deployment", "namespace", "key"])
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        (" a", "white space"),
        ("a\n", "white space"),
        ("a\u00a0", "white space"),
        ("a\tb", r"U\+0009"),
        ("a\x00b", r"U\+0000"),
        ("a\x85b", r"U\+0085"),
        ("a\ud800b", r"U\+D800"),
        ("a\u2028b", r"U\+2028"),
        ("k" * (MAX_KEY_LENGTH + 1), "513 characters"),
        (None, "is a NoneType"),
        (7, "is a int"),
    ],
)
def test_a_part_that_cannot_be_kept_is_refused_by_its_name(name, text, fault):
    parts = {"deployment": "d", "namespace": "n", "key": "k"} | {name: text}
    with pytest.raises(PlanningError, match=f"(?s)The {name} .*{fault}"):
        keys.identity(**parts)


def test_an_identity_that_postgresql_could_not_index_is_refused():
    with pytest.raises(PlanningError, match="bytes together"):
        keys.identity("default", "𝄞" * 400, "𝄞" * 400)


# --- the default scope ------------------------------------------------------------------------------------------------


def test_a_partition_date_goes_before_a_partition_key_and_that_before_the_logical_date():
    assert keys.default_scope(NOON, None, NOON) == "pd:2026-10-01T12:00:00Z"
    assert keys.default_scope(None, "eu", NOON) == "pk:eu"
    assert keys.default_scope(None, None, NOON) == "ld:2026-10-01T12:00:00Z"
    assert keys.default_scope(None, "", None) is None


@pytest.mark.parametrize(
    "label",
    ["2026-10-01", "20261001", "2026-10-01T12", "2026-10-01T14:00:00+0200", "2026-10", "2026", "2026-10-02T00:00"],
)
def test_a_partition_key_that_only_writes_its_date_is_no_part_of_the_name(label):
    assert keys.default_scope(NOON, label, None) == "pd:2026-10-01T12:00:00Z"


@pytest.mark.parametrize("label", ["eu", "eu|2026-10-01", "7-2026-10-01", "2026-10-01-12", "2026-10-01|eu", "2026-W40"])
def test_p02_a_partition_key_that_says_more_than_its_date_names_a_partition_of_its_own(label):
    assert keys.default_scope(NOON, label, None) == f"pd:2026-10-01T12:00:00Z/pk:{label}"


@pytest.mark.parametrize("label", ["2026-10-01", "20261001", "eu|2026-10", "2026-W40"])
def test_p02_a_partition_that_tells_of_a_time_and_has_no_date_is_refused(label):
    with pytest.raises(PlanningError, match=r"has no date in this run.*\{\{ dag_run.partition_key \}\}"):
        keys.default_scope(None, label, None)


def test_a_run_in_another_zone_has_the_same_scope():
    assert keys.default_scope(None, None, NOON.astimezone(BERLIN)) == keys.default_scope(None, None, NOON)
    assert keys.default_scope(None, None, pendulum.instance(NOON).in_timezone("Asia/Tokyo")) == keys.default_scope(
        None, None, NOON
    )


def test_a_naive_date_names_no_moment():
    with pytest.raises(PlanningError, match=r"logical date .* no time zone"):
        keys.default_scope(None, None, datetime(2026, 10, 1))  # noqa: DTZ001


# --- the canonical form -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, id="order of a dict"),
        pytest.param({"a": 1}, MappingProxyType({"a": 1}), id="kind of mapping"),
        pytest.param({3, 1, 2}, frozenset([2, 3, 1]), id="order of a set"),
        pytest.param([1, 2], (1, 2), id="tuple and list"),
        pytest.param(Decimal("1.0"), Decimal("1.00"), id="trailing zeros"),
        pytest.param(Decimal(100), Decimal("1E+2"), id="exponent"),
        pytest.param(Decimal("-0.00"), Decimal(0), id="decimal zero"),
        pytest.param(-0.0, 0.0, id="float zero"),
        pytest.param(NOON, NOON.astimezone(BERLIN), id="zones"),
        pytest.param(NOON, pendulum.instance(NOON).in_timezone("Asia/Tokyo"), id="pendulum"),
        pytest.param(date(2026, 10, 1), pendulum.date(2026, 10, 1), id="pendulum date"),
        pytest.param(timedelta(days=1), timedelta(hours=24), id="timedelta"),
        pytest.param(timedelta(hours=1, microseconds=1), pendulum.duration(hours=1, microseconds=1), id="duration"),
        pytest.param(Size.SMALL, 1, id="enum"),
        pytest.param(Level.LOW, 1, id="int enum"),
        pytest.param(Currency.EUR, "eur", id="str enum"),
        pytest.param(b"ab", bytearray(b"ab"), id="bytes"),
        pytest.param(Line("x", Decimal(1)), {"item": "x", "price": Decimal("1.0")}, id="dataclass"),
        pytest.param(Model(item="x", price=Decimal(1)), Line("x", Decimal(1)), id="model"),
    ],
)
def test_equal_data_has_equal_bytes(a, b):
    assert payloads.canonical(a) == payloads.canonical(b)


DISTINCT: list[Any] = [
    *[None, True, False, 0, 1, -1, 1.0, 0.0, 0.1, 0.1 + 0.2, 0.3, Decimal(0), Decimal(1), Decimal("0.1"), Decimal(10)],
    *[Decimal("1E-40"), Decimal("1E+40"), 10**40, 1e40],
    *["", "0", "1", "1.0", "null", "None", "true", "a,b", '"', 'a"', "[1]", '{"a":1}', 'decimal"1"', "é", "e\u0301"],
    *["\x00", "A", "a", " a", b"", b"1", b"a", [], {}, set(), [None], [1], ["1"], [[1]], [1, 1], {1}, {"1"}],
    *[["a", "b"], ["b", "a"], ["a,b"], ['a","b'], {"a": 1}, {"a": "1"}, {"a": None}, {"a": 1, "b": None}, {1: 1}],
    *[{"1": 1}, {"a": {"b": 1}}, {"a": {}, "b": 1}, {None: 1}, {"null": 1}, PurePosixPath("a"), UUID(int=1)],
    *[str(UUID(int=1)), NOON, NOON.replace(tzinfo=None), NOON.isoformat(), NOON + timedelta(microseconds=1)],
    *[date(2026, 10, 1), "2026-10-01", datetime(2026, 10, 1), time(12), "12:00:00", timedelta(0), timedelta(seconds=1)],  # noqa: DTZ001
]


def test_different_data_has_different_bytes():
    forms = [payloads.canonical(value) for value in DISTINCT]
    assert len(set(forms)) == len(DISTINCT)
    # No form is the beginning of a list of another: side by side they stay apart as well.
    pairs = {payloads.canonical([a, b]) for a in DISTINCT for b in DISTINCT}
    assert len(pairs) == len(DISTINCT) ** 2


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.text(alphabet='{}[]",:\\a1', max_size=6)
    | st.binary(max_size=8)
    | st.datetimes()
    | st.datetimes(
        min_value=datetime(1900, 1, 1),  # noqa: DTZ001  # Hypothesis wants it naive
        timezones=st.sampled_from([UTC, BERLIN, timezone(timedelta(hours=-7))]),
    )
    | st.dates()
    | st.timedeltas()
    | st.uuids()
)
_data = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


def _same(a: Any, b: Any) -> bool:
    """Equality of data, written down a second time without any text: types count, and then the values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, datetime) and a.tzinfo and b.tzinfo:
        return a.astimezone(UTC) == b.astimezone(UTC)  # == of two times in one zone ignores `fold`
    return a == b


@given(_data, _data)
def test_canonical_bytes_are_equal_exactly_when_the_data_is(a, b):
    assert (payloads.canonical(a) == payloads.canonical(b)) == _same(a, b)
    assert payloads.canonical([a, b]) != payloads.canonical([[a], b])


def _rebuilt(value: Any, draw: Any) -> Any:
    """The same data in other clothes: dicts in another order, tuples for lists, moments in another zone."""
    if isinstance(value, dict):
        return {key: _rebuilt(value[key], draw) for key in draw(st.permutations(list(value)))}
    if isinstance(value, list):
        return tuple(_rebuilt(item, draw) for item in value)
    if isinstance(value, datetime) and value.tzinfo:
        return value.astimezone(timezone(timedelta(hours=draw(st.integers(-12, 12)))))
    return value


@given(_data, st.data())
def test_canonical_bytes_are_stable_when_the_same_data_is_built_otherwise(value, data):
    assert payloads.canonical(_rebuilt(value, data.draw)) == payloads.canonical(value)


@given(st.decimals(allow_nan=False, allow_infinity=False), st.integers(0, 5))
def test_a_decimal_is_its_value_under_any_context_of_the_thread(number, zeros):
    sign, digits, exponent = number.as_tuple()
    padded = Decimal((sign, (*digits, *[0] * zeros), exponent - zeros))
    with localcontext() as context:
        context.prec, context.capitals = 3, 0
        assert payloads.canonical(padded) == payloads.canonical(number)
    assert Decimal(keys.number_text(number)) == number


_IN_ANOTHER_PROCESS = """
import json, sys
from datetime import UTC, datetime
from decimal import Decimal
from airflow_runguard.core import keys, payloads
order = {"lines": {"b", "a", "c", "d"}, "at": datetime(2026, 10, 1, tzinfo=UTC), "cents": Decimal("5.10"),
         "names": {w: None for w in {"x", "y", "z"}}, "nested": [{"k": frozenset(range(9))}]}
made = payloads.payload(order)
print(json.dumps([made.digest, made.fields, keys.vendor_key("i", keys.identity("d", "n", "k"), "body", 1, 1)]))
"""


def test_keys_and_digests_are_equal_in_every_process():
    answers = {
        subprocess.run(
            [sys.executable, "-c", _IN_ANOTHER_PROCESS],
            env=os.environ | {"PYTHONHASHSEED": seed, "TZ": zone, "LC_ALL": "C"},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        for seed, zone in [("0", "UTC"), ("1", "Asia/Tokyo"), ("random", "America/New_York")]
    }
    assert len(answers) == 1


def test_the_bytes_of_version_1_are_these():
    """Every record of the past is compared under the form that it was booked with: this test may only grow."""
    order = {
        "id": 7,
        "at": NOON,
        "cents": Decimal("9.50"),
        "rate": 0.5,
        "note": "é",
        "tags": {"b", "a"},
        "to": [None, True],
    }
    assert payloads.CANONICAL_VERSION == 1
    assert payloads.canonical(order) == (
        b'{"at":datetime"2026-10-01T12:00:00Z","cents":decimal"9.5","id":7,"note":"\\u00e9","rate":float"0.5",'
        b'"tags":set["a","b"],"to":[null,true]}'
    )


# --- what is refused --------------------------------------------------------------------------------------------------


class _Lazy:
    """Claims to be a text, as a lazy proxy does."""

    __class__ = str  # type: ignore[assignment]


class _Faulty:
    def model_dump(self) -> dict[str, Any]:
        raise OSError("gone")


def _nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


_LOOP: list[Any] = []
_LOOP.extend([_LOOP, _LOOP])


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (float("nan"), r"order\.at\[1\] is nan"),
        (float("-inf"), r"order\.at\[1\] is -inf"),
        (Decimal("NaN"), r"order\.at\[1\] is NaN"),
        (Decimal("sNaN"), r"order\.at\[1\] is sNaN"),
        (object(), r"order\.at\[1\] is a object"),
        (ValueError("no"), "is a ValueError"),
        (len, "is a builtin_function_or_method"),
        ((i for i in [1]), "is a generator"),
        pytest.param(_Lazy(), "_Lazy", id="lazy"),
        (1j, "is a complex"),
        ("\ud800", "surrogate"),
        ({"\udfff": 1}, "surrogate"),
        (time(12, tzinfo=UTC), "without a date"),
        (pendulum.duration(months=1), "span of months"),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=5))), "no moment in UTC"),
        ({(1, 2): 3}, "key that is a tuple"),
        ({Size.SMALL: "a", 1: "b"}, "two keys that are the same data"),
        (1 << payloads.MAX_INT_BITS, "4097 bits"),
        (_LOOP, "contains itself"),
        (_nested(payloads.MAX_DEPTH), "over 100 levels"),
        (_Faulty(), "_Faulty, cannot be read: OSError: gone"),
        ("x" * payloads.MAX_PAYLOAD, "over 1000000 characters"),
        (["x" * 1000] * 1000, "over 1000000 characters"),
    ],
)
def test_what_cannot_be_canonical_is_refused_with_its_path_and_what_to_do(value, fault):
    for refused in (payloads.canonical, lambda order: payloads.payload({"order": order["order"]})):
        with pytest.raises(PlanningError, match=fault) as caught:
            refused({"order": {"at": [0, value]}})
        assert "payload=" in str(caught.value)


def test_the_bounds_themselves_are_allowed():
    assert payloads.canonical(_nested(payloads.MAX_DEPTH)).startswith(b"[[[[")
    assert payloads.canonical((1 << payloads.MAX_INT_BITS) - 1)
    assert len(payloads.canonical("x" * (payloads.MAX_PAYLOAD - 2))) == payloads.MAX_PAYLOAD


def test_a_field_whose_name_is_no_text_is_refused():
    with pytest.raises(PlanningError, match="field named by a int"):
        payloads.payload({1: 2})  # type: ignore[dict-item]


# --- the payload ------------------------------------------------------------------------------------------------------


def test_p11_every_field_that_was_added_removed_or_changed_is_named():
    before = payloads.payload({"amount": 5, "to": "a", "note": None, "at": NOON})
    after = payloads.payload({"amount": "5", "to": "a", "currency": "eur", "at": NOON.astimezone(BERLIN)})
    assert payloads.differing(before.fields, after.fields) == ("amount", "currency", "note")
    assert before.digest != after.digest
    assert payloads.differing(before.fields, before.fields) == ()


@given(st.dictionaries(st.text(max_size=5), _data, max_size=5), st.dictionaries(st.text(max_size=5), _data, max_size=5))
def test_p11_two_payloads_have_one_digest_exactly_when_no_field_differs(a, b):
    one, other = payloads.payload(a), payloads.payload(b)
    assert (one.digest == other.digest) == (payloads.differing(one.fields, other.fields) == ())


@pytest.mark.parametrize("first", ["plain", "enum"])
def test_a_name_that_is_more_than_a_text_is_written_by_its_value_whoever_came_first(first):
    fields = f"lane_{first}"  # the shape of these names is seen for the first time

    def written(name):
        return payloads.canonical({fields: 1, name: 2})

    if first == "plain":
        assert b'"x":2' in written("x")
    assert b'"fast":2' in written(Lane.FAST)
    assert b'"x":2' in written("x")


def test_the_digest_of_a_payload_is_that_of_its_canonical_form():
    order = {"b": 1, "a": [NOON]}
    assert payloads.payload(order).digest == hashlib.sha256(payloads.canonical(order)).hexdigest()
    assert payloads.payload(order).version == payloads.CANONICAL_VERSION


def test_the_readable_fields_show_a_person_what_the_order_is():
    order = {
        "invoice": Line("x", Decimal("9.50")),
        "at": NOON,
        "n": 3,
        "f": 0.5,
        "ok": True,
        "none": None,
        "raw": b"ab",
    }
    shown = payloads.payload(order).readable
    assert json.loads(json.dumps(shown)) == shown
    assert shown == {
        "invoice": {"item": "x", "price": "9.50"},
        "at": "2026-10-01T12:00:00Z",
        "n": 3,
        "f": 0.5,
        "ok": True,
        "none": None,
        "raw": "2 bytes, sha256 fb8e20fc2e4c3f248c60c39bd652f3c1347298bb977b8b4d5903b85055620603",
    }


SECRETS = """
    password db_passwd apiKey api-key API_KEY access_token Authorization client_secret cookie
    card_number cardNumber cvc iban pin pan privateKey credentials
"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_the_readable_fields_hold_no_secret_at_any_level(name):
    made = payloads.payload({name: "hush-hush", "nested": [{"deep": {name: ["hush-hush"]}}]})
    assert "hush-hush" not in json.dumps(made.readable)
    assert made.readable[name] == "***"
    assert made.fields[name] != payloads.payload({name: "other"}).fields[name]  # it still counts as part of the order


@pytest.mark.parametrize("name", ["shipping", "company", "author", "key", "number", "amount", "idempotency_key"])
def test_ordinary_names_are_shown(name):
    assert payloads.payload({name: "plain"}).readable == {name: "plain"}


def test_a_password_inside_an_address_is_masked():
    assert payloads.payload({"to": "see https://me:hush@vendor.example/x"}).readable == {
        "to": "see https://***@vendor.example/x"
    }


def test_long_texts_and_large_fields_are_cut_with_a_note():
    shown = payloads.payload({"long": "x" * 500, "many": list(range(5000)), "nul": "a\x00b", "small": 1}).readable
    assert shown["long"] == "x" * payloads.READABLE_TEXT + "… (500 characters)"
    assert shown["many"] == "… (28900 characters, not shown)"
    assert shown["nul"] == "a\\x00b"
    assert shown["small"] == 1
    crowd = payloads.payload({f"field{i}": i for i in range(5000)}).readable
    assert crowd["…"] == f"{5000 - (len(crowd) - 1)} more fields"


@given(st.dictionaries(st.text(max_size=5), _data, max_size=5))
def test_the_readable_fields_are_bounded_json(order):
    text = json.dumps(payloads.payload(order).readable, allow_nan=False)
    assert "\\u0000" not in text
    assert len(text) <= payloads.READABLE_TOTAL + 100


class Fields(dict):
    """A mapping that no short way is for."""


_NAMES = st.sampled_from(["id", "password", "a b", "é", "", "n" * 201]) | st.text(max_size=3)
_PARTS = (
    st.sampled_from(
        [None, True, 10**18, 1.5, "http://me:hush@h/x", "\ud800", "a\x00b", "x" * 200, "x" * 201, "\x01" * 200]
    )
    | st.text(max_size=5)
    | st.integers()
)


@given(st.dictionaries(_NAMES, _PARTS, max_size=9))
def test_the_short_way_of_showing_arguments_shows_what_the_long_way_does(arguments):
    assert payloads.readable(arguments) == payloads.readable(Fields(arguments))


def test_a_calls_arguments_are_shown_whatever_they_are():
    doubled: list[Any] = []
    for _ in range(60):
        doubled = [doubled, doubled]
    kinds = {"client": object(), "loop": _LOOP, "big": [0] * 10**6, "doubled": doubled, "m": _Faulty()}
    shown = payloads.readable({"cents": 5, **kinds, "token": "x"})
    assert shown == {
        "cents": 5,
        "client": "<object>",
        "loop": "<list>",
        "big": "<list>",
        "doubled": "<list>",
        "m": f"<{__name__}._Faulty>",
        "token": "***",
    }


# --- the vendor key ---------------------------------------------------------------------------------------------------


def test_a_vendor_key_is_short_printable_and_repeatable():
    key = keys.vendor_key("installation", ME, "charge", 1, 1)
    assert key == keys.vendor_key(b"installation", ME, "charge", 1, 1)
    assert key.startswith("rg1-")
    assert len(key) <= 45
    assert set(key) <= set(string.ascii_letters + string.digits + "-_")


def test_the_vendor_key_of_version_1_is_this():
    """A release that changed it would charge every open doubt of ``on_doubt="replay"`` a second time."""
    assert keys.vendor_key("installation", ME, "charge", 1, 1) == "rg1-k1rq8FX6IGhDbTXkksc8jLhnkzz2AXIth_SfOpbj"


def test_no_two_pieces_of_work_share_a_vendor_key():
    made = [
        keys.vendor_key(*parts)
        for parts in [
            ("i", ME, "charge", 1, 1),
            ("j", ME, "charge", 1, 1),
            ("i", Identity("test", ME.namespace, ME.key), "charge", 1, 1),
            ("i", Identity("default", "billin", "ginvoice/7"), "charge", 1, 1),
            ("i", Identity("default", "billing", "invoice/"), "7charge", 1, 1),
            ("i", ME, "refund", 1, 1),
            ("i", ME, "charge", 2, 1),
            ("i", ME, "charge", 1, 2),
            ("i", ME, "charge", 11, 1),
            ("i", ME, "charge", 1, 11),
            ("i", ME, "charge1", 1, 1),
        ]
    ]
    assert len(set(made)) == len(made)


_part = st.text(alphabet="ab/1", min_size=1, max_size=3)
_parts = st.tuples(_part, st.builds(Identity, _part, _part, _part), _part, st.integers(1, 12), st.integers(1, 12))


@given(_parts, _parts)
def test_vendor_keys_are_equal_exactly_when_all_parts_are(a, b):
    assert (keys.vendor_key(*a) == keys.vendor_key(*b)) == (a == b)


def test_a_ledger_without_an_installation_id_makes_no_vendor_keys():
    with pytest.raises(PlanningError, match="no installation id"):
        keys.vendor_key("", ME, "charge", 1, 1)


def test_an_airflow_params_dict_is_a_mapping_of_its_values():
    from airflow.sdk.definitions.param import Param, ParamsDict

    params: Mapping[str, Any] = ParamsDict({"account": Param("a7", type="string"), "cents": 5})
    assert payloads.canonical(params) == payloads.canonical({"account": "a7", "cents": 5})
