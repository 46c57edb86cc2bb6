#!/usr/bin/env bash
# Runs every example; each ends by itself. None may be longer than 120 lines.
set -euo pipefail
cd "$(dirname "$0")/.."
for file in examples/*.rs; do
  name=$(basename "$file" .rs)
  lines=$(wc -l <"$file")
  [ "$lines" -lt 120 ] || { echo "$file has $lines lines; examples stay under 120" >&2; exit 1; }
  echo "-- $name"
  timeout 120 cargo run -q --locked -p iop-examples --example "$name"
done
