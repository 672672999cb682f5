"""The families in the order in which they are asked, the general one last. Each is one file of data.

A vendor is added by one more file and its name here; one's own rules come through the entry point group
``airflow_runguard.failure_rules`` or ``rules=`` and are asked first. See ``docs/classifier.md``.
"""

from airflow_runguard.core.failures.families import (
    airflow,
    anthropic,
    aws,
    databricks,
    elasticsearch,
    github,
    google,
    http,
    hubspot,
    meta,
    microsoft,
    openai,
    own,
    salesforce,
    shopify,
    slack,
    snowflake,
    sql,
    stripe,
)
from airflow_runguard.core.failures.rule import Family

FAMILIES: tuple[Family, ...] = (
    own.FAMILY,
    http.FIRST,
    openai.FAMILY,
    anthropic.FAMILY,
    google.FAMILY,
    aws.FAMILY,
    stripe.FAMILY,
    github.FAMILY,
    slack.FAMILY,
    salesforce.FAMILY,
    hubspot.FAMILY,
    shopify.FAMILY,
    meta.FAMILY,
    microsoft.FAMILY,
    snowflake.FAMILY,
    databricks.FAMILY,
    elasticsearch.FAMILY,
    sql.FAMILY,
    airflow.FAMILY,
    http.FAMILY,
)

RULES = tuple(rule for family in FAMILIES for rule in family.rules)
