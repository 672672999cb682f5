"""What a type checker must refuse; each such line says so at its end. Never run."""

from __future__ import annotations

from airflow_runguard import Guard, GuardContext, ItemContext, guarded_batch_task, guarded_task


@guarded_task(on_dobut="ask")  # wrong: the option's name
def misspelt(amount: int) -> int:
    return amount


@guarded_task(on_doubt="retry")  # wrong: not one of its words
def no_such_word(amount: int) -> int:
    return amount


@guarded_task(lease="30")  # wrong: neither seconds nor timedelta
def no_time(amount: int) -> int:
    return amount


@guarded_task(key="invoice/{{ args.invoice.id }}")
def charge(guard: GuardContext, invoice: dict[str, int]) -> int:
    return guard.call("charge", len, invoice)


def author(guard: GuardContext, invoice: dict[str, int]) -> None:
    charge(guard, invoice)  # wrong: the guard is given by the guard
    charge("invoice")  # wrong: the argument's type
    charge()  # wrong: the argument is missing
    charge(bill=invoice)  # wrong: the argument's name
    text: str = guard.call("count", len, invoice)  # wrong: a call returns what its function returns
    guard.call(len, "count")  # wrong: the name comes first
    assert text


Guard(on_busy="x")  # wrong: not one of its words
Guard(max_claims="3")  # wrong: not a number
Guard(keys="k")  # wrong: the option's name


@guarded_batch_task(item_key="id", concurrency="4")  # wrong: not a number
def charge_each(guard: ItemContext, invoice: dict[str, int], currency: str = "eur") -> int:
    return invoice["cents"]


@guarded_batch_task(item_key="id")
def pay_each(guard: ItemContext, invoice: dict[str, int], currency: str = "eur") -> int:
    return invoice["cents"]


pay_each([], money="chf")  # wrong: the argument's name
