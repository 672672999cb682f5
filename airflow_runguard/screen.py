"""What a person sees: the data of the commands as tables and sentences, and as JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from airflow_runguard.explain import iso, one_line, when

Data = Mapping[str, Any]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]")


def as_json(data: Data) -> str:
    """Times to the last digit: one of them may be given back as `--as-of`."""
    return json.dumps(data, default=_exact, ensure_ascii=False, indent=2)


def _exact(value: Any) -> Any:
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else str(value)


def _plain(value: Any) -> Any:
    return iso(value) if isinstance(value, datetime) else str(value)


def as_text(command: str, data: Data) -> str:
    """The command's own picture, or the sentence that it said."""
    return harmless(PICTURES.get(command, said)(data))


def harmless(text: str) -> str:
    """Without control characters: errors are a vendor's words, and could steer the reader's terminal."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def said(data: Data) -> str:
    lines = [data["said"]] if "said" in data else [str(data["sql"])]
    return "\n".join((*lines, *_commands(data.get("commands", {}))))


def records(data: Data) -> str:
    if not data["records"]:
        tested = "" if "~" in data["deployment"] else f" What dag.test() did: --deployment={data['deployment']}~test."
        return f"No record of deployment {data['deployment']!r}.{tested}"
    rows = [("ID", "RECORD", "STATE", "GEN", "SINCE", "NOTE")]
    for record in data["records"]:
        name = f"{record['namespace']}/{record['key']}"
        mark = " (needs a person)" if record["needs_person"] and record["state"] != "broken" else ""
        note = one_line(str(record["broken"] or record["error"]))
        since = when(record["updated_at"], data["now"])
        rows.append((str(record["id"]), name, record["state"] + mark, str(record["generation"]), since, _short(note)))
    more = f"\nMore: --after {data['next']}" if data["next"] else ""
    return table(rows) + more


def items(data: Data) -> str:
    counted = [
        f"{count['items']} {count['state']}{':' + count['failure_class'] if count['failure_class'] else ''}"
        for count in data["counts"]
    ]
    rows = [("ITEM", "STATE", "SENT", "NOTE")]
    for item in data["items"]:
        state = f"{item['state']}:{item['failure_class']}" if item["failure_class"] else str(item["state"])
        note = one_line(item["error"] or item["evidence"])
        rows.append((item["name"], state, when(item["intent_at"], data["now"]), _short(note)))
    more = f"\nMore: --after-item {shlex.quote(data['next'])}" if data["next"] else ""
    return f"{', '.join(counted) or 'No items'}\n\n{table(rows)}{more}"


def show(data: Data) -> str:
    lines = _fields({k: v for k, v in data.items() if k not in ("calls", "now", "commands")}, data["now"])
    for call in data["calls"]:
        lines.append(f"\ncall {call['name']} (generation {call['generation']})")
        lines += ["  " + line for line in _fields(call, data["now"])]
    return "\n".join(lines)


def broken_line(data: Data) -> str:
    if "said" in data:
        return said(data)
    return "\n".join(
        (
            f"Not trusted: {data['why']}. This is the line as it stands; ask the vendor what is true, then say it:",
            *_commands(data["commands"]),
            "",
            show({k: v for k, v in data.items() if k not in ("why", "broken")}),
        )
    )


def explain(data: Data) -> str:
    record, now = data["record"], data["now"]
    lines = [
        f"{record['namespace']}/{record['key']} · {record['state']} · deployment {record['deployment']}, "
        f"generation {record['generation']}"
    ]
    if data["lost_time"]:
        lines.append(f"Careful: the ledger lost time ({data['lost_time']}).")
    lines += ["", data["why"], f"Who moves it on: {data['who']}."]
    lines += _commands(data["commands"])
    if data["payload"]:
        lines += ["", f"The order: {json.dumps(data['payload'], default=_plain, ensure_ascii=False)}"]
    calls = [call for call in data["calls"] if call["generation"] == record["generation"]]
    lines += ["", "To look up at the vendor:"] if calls else []
    for call in calls:
        sent = f", last sent {when(call['intent_at'], now)}" if call["intent_at"] else ""
        state = str(call["state"]).replace("_", " ")
        lines.append(f"  call {call['name']} ({state}){sent}: vendor key {call['vendor_key']}")
        if call["external_id"]:
            lines.append(f"    the vendor's own id: {call['external_id']}")
        if call["intent"]:
            lines.append(f"    with {json.dumps(call['intent'], default=_plain, ensure_ascii=False)}")
    lines += ["", "What happened:"]
    lines += [f"  {when(event['at'], now)}  {event['sentence']}" for event in data["timeline"]] or ["  nothing booked"]
    return "\n".join(lines)


def gates(data: Data) -> str:
    if not data["gates"]:
        return "No gate: nothing was ever paused."
    rows = [("GATE", "OPEN", "CLOSED UNTIL", "WAITING", "RATE", "WHY", "BY")]
    for one in data["gates"]:
        until = when(one["closed_until"], data["now"])
        rate = f"{one['rate']:g}/s" if one["rate"] else "default"
        why = _short(one_line(one["why"]), 60)
        rows.append((one["gate"], "yes" if one["open"] else "no", until, str(one["waiting"]), rate, why, one["by"]))
    return table(rows)


def gate(data: Data) -> str:
    lines = _fields({k: v for k, v in data.items() if k not in ("records", "now")}, data["now"])
    if data["records"]:
        rows = [("WAITS", "STATE", "UNTIL", "TASK")]
        for one in data["records"]:
            until = when(one["resume_at"], data["now"]) or "somebody opens it"
            rows.append((one["record"], one["state"], until, one["holder"]))
        lines += ["", table(rows)]
    return "\n".join(lines)


def freezes(data: Data) -> str:
    if not data["freezes"]:
        return "Nothing is frozen."
    rows = [("SCOPE", "VALUE", "SINCE", "BY", "WHY", "THAWED")]
    for one in data["freezes"]:
        thawed = f"{when(one['thawed_at'], data['now'])} by {one['thawed_by']}" if one["thawed_at"] else ""
        since = when(one["at"], data["now"])
        rows.append((one["scope"], one["value"], since, one["actor"], _short(one_line(one["reason"]), 60), thawed))
    return table(rows)


def check(data: Data) -> str:
    return "\n".join((data["said"], *_fields({k: v for k, v in data.items() if k != "said"}, data["now"])))


def doctor(data: Data) -> str:
    lines = []
    for one in data["checks"]:
        lines.append(f"{one['status']:<8}{one['name']:<19}{one['found']}")
        if one["status"] in ("warn", "fail"):
            lines += [f"{'':27}{one['meaning']}", f"{'':27}{one['remedy']}"]
    return "\n".join((*lines, "", data["said"]))


def classified(data: Data) -> str:
    rule = data["rule"]
    by = [f"Rule {rule['name']}: {rule['says']}.", f"Source: {rule['source']}"] if rule else ["No rule knows it."]
    shown = ("failure_class", "effect", "pausable", "resume_after", "floor", "needs_person", "final")
    facts = [f"  {name:<14}{data[name]}" for name in shown if data[name] not in (None, False)]
    return "\n".join((data["said"], "", *facts, "", *by, f"Seen: {data['evidence']}"))


def _commands(commands: Mapping[str, str]) -> list[str]:
    return [line for true, typed in commands.items() for line in (f"  {true}:", f"    {typed}")]


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _fields(data: Data, now: datetime) -> list[str]:
    """``name  value``, without what is empty."""
    shown = [(name, _value(value, now)) for name, value in data.items() if value not in (None, "", {}, [])]
    width = max((len(name) for name, _ in shown), default=0)
    return [f"{name:<{width}}  {value}" for name, value in shown]


def _value(value: Any, now: datetime) -> str:
    if isinstance(value, datetime):
        return when(value, now)
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, default=_plain, ensure_ascii=False)
    return one_line(str(value))


def _short(text: str, limit: int = 90) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def preview(data: Data) -> str:
    rows = [("TASK", "RUN", "RECORD", "WOULD")]
    for work in data["works"]:
        name = work["record"] or _short(f"? {work['why']}")
        rows.append((work["task_id"], work["run_id"], name, work["would"].replace("_", " ")))
    return f"{data['said']}\n{table(rows)}" if len(rows) > 1 else str(data["said"])


def baseline(data: Data) -> str:
    return "\n".join((*data["records"], data["said"]))


def candidates(data: Data) -> str:
    rows = [("TASK", "WHY", "FILE"), *((f"{t['dag_id']}.{t['task_id']}", t["why"], t["file"]) for t in data["tasks"])]
    return f"{table(rows)}\n{data['said']}" if data["tasks"] else str(data["said"])


def audit(data: Data) -> str:
    rows = [("FINDING", "WHAT"), *((finding["kind"], finding["what"]) for finding in data["findings"])]
    return f"{table(rows)}\n{data['said']}" if data["findings"] else str(data["said"])


PICTURES: Mapping[str, Callable[[Data], str]] = {
    "list": records,
    "show": show,
    "items": items,
    "repair": broken_line,
    "explain": explain,
    "db check": check,
    "doctor": doctor,
    "quota list": gates,
    "quota show": gate,
    "freezes": freezes,
    "classify": classified,
    "preview": preview,
    "baseline": baseline,
    "candidates": candidates,
    "audit": audit,
}
