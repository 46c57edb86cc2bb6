#!/usr/bin/env python3
"""Joins outcome files of sdk_python.py and sdk_node.mjs into one Markdown table, each cell beside what was expected.

usage: table.py NAME=FILE... [--no-stream NAME,...]   (a file has lines case<TAB>outcome<TAB>detail)
The expectation comes from the bytes a case sends (fault_server.py --expected): `text` means success with exactly that text,
`error` a typed error. A typed error where text was possible is allowed and marked; a success where an error was due, or with
another text, is silent loss. Exit status 1 on silent_loss, crash, or a hang that is not one of the stalls."""
import argparse, os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from fault_server import EXPECTED

STALLS = {"ping_then_stall", "silent_stall", "role_only_then_stall"}
ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("files", nargs="+"); ap.add_argument("--no-stream", default="")
a = ap.parse_args()
plain = set(filter(None, a.no_stream.split(",")))
runs = {}
for item in a.files:
    name, path = item.split("=", 1)
    with open(path) as lines: runs[name] = dict(line.rstrip("\n").split("\t")[:2] for line in lines if line.count("\t") >= 2)
cases = [case for case in EXPECTED if not case.startswith(("r_", "o_"))]
bad, totals = [], {name: {} for name in runs}
print("| case | expected, streamed | expected, whole | " + " | ".join(runs) + " |")
print("| --- | --- | --- |" + " --- |" * len(runs))
for case in cases:
    want = {False: EXPECTED[case]["terminal"], True: EXPECTED[case]["no_stream"]["terminal"]}
    cells = []
    for name, outcomes in runs.items():
        got = outcomes.get(case, "not run"); due = want[name in plain]
        totals[name][got] = totals[name].get(got, 0) + 1
        if got in ("silent_loss", "crash", "not run") or (got == "hang" and case not in STALLS): bad.append((case, name, got))
        if got == "ok" and due != "ok": bad.append((case, name, "success where an error was due"))
        cells.append({"ok": "text", "typed_error": "error" if due != "ok" else "error (allowed)", "hang": "client timeout"}.get(got, got))
    print(f"| `{case}` | {'text' if want[False] == 'ok' else 'error'} | {'text' if want[True] == 'ok' else 'error'} | " + " | ".join(cells) + " |")
print()
for name, counts in totals.items(): print(f"- {name}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
for case, name, what in bad: print(f"BAD {case} {name}: {what}", file=sys.stderr)
sys.exit(1 if bad else 0)
