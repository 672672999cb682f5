"""Elasticsearch and OpenSearch. A bulk call succeeds although its items fail: see ``results.py``."""

from airflow_runguard.core.failures.rule import Family, cap, open_end, prose, rate, refused, words
from airflow_runguard.core.record import FailureClass

FAMILY = Family(
    "Elasticsearch, OpenSearch",
    "https://www.elastic.co/guide/en/elasticsearch/reference/current/docs-bulk.html",
    packages=frozenset({"elasticsearch", "elastic_transport", "opensearchpy", "elasticsearch8", "elasticsearch7"}),
    hosts=(".elastic-cloud.com", ".es.io"),
    headers=("x-elastic-", "x-opaque-id", "x-found-"),
    codes=words("es_rejected_execution_exception circuit_breaking_exception cluster_block_exception"),
    rules=(
        cap(
            "elasticsearch-disk-full",
            "the disk is full, so that the index takes no writes until somebody makes room",
            codes=words("cluster_block_exception"),
            text=prose(r"disk usage exceeded|flood-stage|read-only-allow-delete"),
        ),
        rate(
            "elasticsearch-busy",
            "the node's queue or memory is full for this moment",
            codes=words(
                "es_rejected_execution_exception rejected_execution_exception circuit_breaking_exception "
                "opensearch_rejected_execution_exception"
            ),
            statuses=frozenset({429, 503}),
            anywhere=True,
        ),
        refused(
            "elasticsearch-refused",
            "the document or the query is refused as it stands",
            codes=words(
                "mapper_parsing_exception document_parsing_exception strict_dynamic_mapping_exception "
                "illegal_argument_exception parsing_exception index_closed_exception security_exception"
            ),
            statuses=range(400, 500),
        ),
        open_end(
            "elasticsearch-timeout",
            "no answer in time; the cluster may have done the work",
            failure_class=FailureClass.TIMEOUT,
            types=frozenset({"elastic_transport.ConnectionTimeout", "opensearchpy.ConnectionTimeout"}),
        ),
        open_end(
            "elasticsearch-connection",
            "the connection failed and the client does not say in which phase",
            types=frozenset({"elastic_transport.ConnectionError", "opensearchpy.ConnectionError"}),
            wrapper=True,
        ),
    ),
)
