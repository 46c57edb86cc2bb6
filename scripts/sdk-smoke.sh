#!/usr/bin/env bash
# The unmodified OpenAI SDKs: a smoke test against `iop up` with the demo model, then every odd answer of the scripted provider
# through Edge and Node. Installs them into a throw-away folder. `--all` takes every client of tests/sdk/README.md instead.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
up=
trap '[ -z "$up" ] || kill "$up" 2>/dev/null || true; rm -rf "$work"' EXIT
bin="${CARGO_TARGET_DIR:-target}/debug"
python=(openai==3.57.0)
node=(openai@6.49.0)
matrix=(--modes stream --clients openai-python,openai-node)
if [ "${1:-}" = --all ]; then
  python+=(langchain-openai==1.7.4 litellm==1.110.2)
  node+=(ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.92 @ai-sdk/open-responses@1.0.39 @langchain/openai@1.5.8 @langchain/core)
  CARGO_TARGET_DIR="$work/rust" cargo build -q --locked --manifest-path tests/sdk/rust/Cargo.toml
  matrix=(--rust "$work/rust/debug/sdk-rs")
fi

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check "${python[@]}"
cargo build -q --locked -p iop -p iop-edge -p iop-node
# Port 0 lets the system choose; no backend is looked for, so the demo model answers.
"$bin/iop" up --listen 127.0.0.1:0 --demo >"$work/up.log" 2>&1 &
up=$!
for _ in $(seq 100); do
  base=$(grep -oE 'http://127\.0\.0\.1:[0-9]+/v1' "$work/up.log" | head -n 1 || true)
  [ -n "$base" ] && break
  kill -0 "$up" 2>/dev/null || { cat "$work/up.log" >&2; exit 1; }
  sleep 0.1
done
[ -n "$base" ] || { echo "iop up printed no base URL:" >&2; cat "$work/up.log" >&2; exit 1; }
"$work/venv/bin/python" tests/sdk/smoke_python.py --base "$base"
clients=(--python "$work/venv/bin/python")
if command -v npm >/dev/null; then
  cp tests/sdk/smoke_node.mjs "$work/"
  (cd "$work" && npm init -y >/dev/null && npm install --silent --no-audit --no-fund "${node[@]}" >/dev/null && node smoke_node.mjs --base "$base")
  clients+=(--node "$work")
fi
"$work/venv/bin/python" tests/sdk/matrix.py --bin "$bin" "${clients[@]}" "${matrix[@]}"
