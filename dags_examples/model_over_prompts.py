"""A paid model API over a file of prompts: each prompt is paid for once, also if the file grows or the task is killed.

A prompt is named by its own id, never by its line. A rate limit makes the task wait without a worker; a spent budget
stops it before another prompt is burned. The API honours no idempotency key, so a lost answer is a person's question.
The client's own retries are off. Reads ``OPENAI_API_KEY`` and, for another address, ``OPENAI_BASE_URL``.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pendulum
from airflow.sdk import dag, task
from openai import OpenAI

from airflow_runguard import BatchResults, guarded_batch_task

PROMPTS = Path("/data/prompts.jsonl")  # lines of {"id": …, "prompt": …}


def prompts() -> Iterator[dict]:
    """Read line by line, so that a file of millions needs no memory."""
    with PROMPTS.open() as lines:
        yield from map(json.loads, lines)


@dag(schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), catchup=False)
def model_over_prompts():
    @guarded_batch_task(key="prompts/v1", item_key="id", quota="openai", concurrency=8, stop_after_share=0.1)
    def answer(item: dict) -> str:
        completion = OpenAI(max_retries=0).chat.completions.create(
            model="gpt-5-mini", messages=[{"role": "user", "content": item["prompt"]}]
        )
        return completion.choices[0].message.content or ""  # an empty answer is no result

    @task
    def longest(summary: dict) -> str:
        return max(BatchResults(summary), key=lambda pair: len(pair[1]))[0]

    longest(answer(prompts))


model_over_prompts()
