#!/usr/bin/env bash
# The unmodified OpenAI SDKs against `iop up` with the demo model. Installs them into a throw-away folder.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
up=
trap '[ -z "$up" ] || kill "$up" 2>/dev/null || true; rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check openai
cargo build -q --locked -p iop
# Port 0 lets the system choose; no backend is looked for, so the demo model answers.
"${CARGO_TARGET_DIR:-target}/debug/iop" up --listen 127.0.0.1:0 --demo >"$work/up.log" 2>&1 &
up=$!
for _ in $(seq 100); do
  base=$(grep -oE 'http://127\.0\.0\.1:[0-9]+/v1' "$work/up.log" | head -n 1 || true)
  [ -n "$base" ] && break
  kill -0 "$up" 2>/dev/null || { cat "$work/up.log" >&2; exit 1; }
  sleep 0.1
done
[ -n "$base" ] || { echo "iop up printed no base URL:" >&2; cat "$work/up.log" >&2; exit 1; }
"$work/venv/bin/python" tests/sdk/smoke_python.py --base "$base"
if command -v npm >/dev/null; then
  cp tests/sdk/smoke_node.mjs "$work/"
  (cd "$work" && npm init -y >/dev/null && npm install --silent --no-audit --no-fund openai@6 >/dev/null && node smoke_node.mjs --base "$base")
fi
