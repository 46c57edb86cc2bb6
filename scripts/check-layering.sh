#!/usr/bin/env bash
# The dependency law of ARCHITECTURE.md, checked: who may depend on what, and what a state machine may name.
set -u
cd "$(dirname "$0")/.." || exit 1
bad=0
fail() { echo "layering: $*" >&2; bad=1; }
tree() { cargo tree --offline --locked -p "$1" --no-default-features -e normal --prefix none -f '{p} [{f}]' 2>/dev/null | sed 's/ (\*)$//' | sort -u; }

for crate in iop-execution iop-credential-lease iop-edge-core iop-node-core; do
  deps=$(tree "$crate")
  [ -n "$deps" ] || { fail "cargo tree gave nothing for $crate"; continue; }
  for banned in tonic hyper reqwest rustls axum clap prometheus-client opentelemetry; do
    grep -qE "^$banned v" <<<"$deps" && fail "$crate must not depend on $banned"
  done
  tokio=$(grep -E '^tokio v' <<<"$deps" | sed 's/.*\[\(.*\)\]$/\1/')
  for feature in ${tokio//,/ }; do
    case $feature in sync | default) ;; *) fail "$crate --no-default-features pulls tokio feature $feature" ;; esac
  done
done

# may CRATE ALLOWED...: no other crate of the workspace under it.
may() {
  local crate=$1 dep; shift
  for dep in $(tree "$crate" | grep -oE '^iop-[a-z-]+ v' | sed 's/ v$//' | grep -vx "$crate" | sort -u); do
    case " $* " in *" $dep "*) ;; *) fail "$crate must not depend on $dep" ;; esac
  done
}
may iop-execution
may iop-credential-lease
may iop-wire iop-execution
may iop-adapters iop-execution
may iop-node-core iop-execution iop-wire iop-credential-lease
may iop-edge-core iop-execution iop-wire iop-credential-lease
tree iop-credential-lease | grep -qE '^http v' && fail "iop-credential-lease must not depend on http"

parents=$(cargo tree --offline --locked --workspace -e normal -i prost --depth 1 --prefix none 2>/dev/null | tail -n +2 | grep -oE '^[a-z0-9-]+' | sort -u | tr '\n' ' ')
for parent in $parents; do
  case $parent in iop-wire | tonic | tonic-prost) ;; *) fail "prost's parent is $parent" ;; esac
done

# A state machine takes `now`; it reads no clock and starts nothing. Tests beside it may do both.
while IFS= read -r file; do
  hits=$(sed '/#\[cfg(test)\]/,$d' "$file" | grep -nE '\btokio\b|Instant::now|SystemTime|\bspawn\b' | grep -vE '^[0-9]+: *//')
  [ -n "$hits" ] && fail "$file: $hits"
done < <(find iop-*/src -path '*/state/*' -name '*.rs' -not -name 'tests.rs' -not -path '*/tests/*'; find iop-*/src -name state.rs)

# prost and tonic types stay behind iop-wire.
if grep -rnE '\b(prost|tonic)::' --include='*.rs' iop-execution/src iop-edge-core/src iop-node-core/src iop-adapters/src iop-credential-lease/src; then
  fail "prost or tonic named outside iop-wire"
fi
[ "$bad" = 0 ] && echo "layering: ok"
exit "$bad"
