#!/usr/bin/env bash
# The second implementation of credential leases (CRD-14) opens the golden set. Installs its one library into a throw-away
# folder.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check 'cryptography>=43'
"$work/venv/bin/python" tests/credential/opener.py tests/credential/golden.json
