"""Shopify: REST answers 429; GraphQL answers 200 and says it in ``extensions.code``, never in the message."""

from airflow_runguard.core.failures.rule import Family, cap, open_end, rate, refused, words

FAMILY = Family(
    "Shopify",
    "https://shopify.dev/docs/api/usage/limits",
    packages=frozenset({"shopify"}),
    hosts=(".myshopify.com",),
    headers=("x-shopify-", "x-shopid"),
    codes=words("THROTTLED MAX_COST_EXCEEDED SHOP_INACTIVE"),
    rules=(
        refused(
            "shopify-too-expensive",
            "the query costs more than the shop's whole bucket holds; it can never pass",
            codes=words("MAX_COST_EXCEEDED"),
        ),
        rate(
            "shopify-throttled", "the shop's bucket is empty for this moment", codes=words("THROTTLED"), anywhere=True
        ),
        cap(
            "shopify-shop",
            "the shop is frozen, locked or not paid",
            statuses=frozenset({402}),
        ),
        cap("shopify-inactive", "the shop is frozen, locked or not paid", codes=words("SHOP_INACTIVE")),
        refused("shopify-denied", "the app may not do this", codes=words("ACCESS_DENIED")),
        open_end("shopify-broke-down", "Shopify broke down while it worked", codes=words("INTERNAL_SERVER_ERROR")),
    ),
)
