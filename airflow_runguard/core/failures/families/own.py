"""The author's own word, before everybody else's."""

from airflow_runguard.core.failures.rule import Family, undone

FAMILY = Family(
    "the author",
    "https://docs.python.org/3/tutorial/errors.html#raising-exceptions",
    (
        undone(
            "not-applied-by-author",
            "the author of the function says that the effect has not happened",
            types=frozenset({"airflow_runguard.NotApplied"}),
            anywhere=True,
        ),
    ),
)
