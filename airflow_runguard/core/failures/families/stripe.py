"""Stripe. A 409 says that the same key is at work, never that it failed; a 402 is a decline, not a quota."""

from airflow_runguard.core.failures.rule import Family, cap, daily, open_end, rate, refused, words

FAMILY = Family(
    "Stripe",
    "https://docs.stripe.com/error-codes",
    packages=frozenset({"stripe"}),
    hosts=("api.stripe.com", "files.stripe.com", "connect.stripe.com"),
    headers=("stripe-",),
    rules=(
        open_end(
            "stripe-key-in-use",
            "another request with this key is under way, which may be an earlier attempt of this very work",
            codes=words("idempotency_key_in_use"),
            anywhere=True,
        ),
        refused(
            "stripe-declined",
            "the card or the bank declined; waiting does not change a decline",
            codes=words("card_error card_declined"),
        ),
        daily(
            "stripe-payouts-of-the-day",
            "the payouts of the day are used up",
            codes=words("payouts_limit_exceeded instant_payouts_limit_exceeded"),
        ),
        cap(
            "stripe-no-balance",
            "the Stripe account has not the money for this",
            codes=words("balance_insufficient"),
        ),
        cap(
            "stripe-account",
            "the account may not do this until somebody completes or unlocks it",
            codes=words("account_closed account_invalid testmode_charges_only payouts_not_allowed"),
            statuses=range(400, 500),
        ),
        rate(
            "stripe-lock-timeout",
            "another request holds the object; this one was not begun",
            codes=words("lock_timeout"),
            statuses=frozenset({429}),
        ),
        rate(
            "stripe-rate-limit",
            "too many requests for this moment",
            codes=words("rate_limit"),
            statuses=frozenset({429}),
        ),
    ),
)
