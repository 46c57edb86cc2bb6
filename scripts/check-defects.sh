#!/usr/bin/env bash
# Whether the tests find what they are for: applies each patch of tests/defects to a copy of the tree, plays the fixed seeds and
# some random ones in the simulator, and expects one to fail. A patch that says "Found by: cargo test ..." is looked for with
# that command instead. With --units it also runs the engine's own tests. Usage:
#   scripts/check-defects.sh [--units] [name ...]
set -u
cd "$(dirname "$0")/.." || exit 1
seeds=${IOP_SIM_SEEDS:-400} start=${IOP_SIM_START:-1}
units=0
[ "${1:-}" = --units ] && { units=1; shift; }
copy=${IOP_DEFECTS_DIR:-target/defects}
mkdir -p "$copy" && copy=$(cd "$copy" && pwd)
export CARGO_TARGET_DIR="$copy/target"
bad=0
for patch in tests/defects/*.patch; do
  name=$(basename "$patch" .patch)
  [ $# -gt 0 ] && { case " $* " in *" $name "*) ;; *) continue ;; esac; }
  # Unchanged files keep their times, so that only what the patch touches is built again.
  git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    cmp -s "$file" "$copy/tree/$file" || { mkdir -p "$copy/tree/$(dirname "$file")" && cp "$file" "$copy/tree/$file"; }
  done
  if ! (cd "$copy/tree" && patch -s -p1 --no-backup-if-mismatch) <"$patch"; then
    echo "$name: the patch does not apply"; bad=1; continue
  fi
  by=$(sed -n '/^diff /q; s/^Found by: cargo test //p' "$patch")
  if [ -n "$by" ]; then
    # shellcheck disable=SC2086 # arguments of cargo, one a word
    if ! (cd "$copy/tree" && cargo test -q --no-run $by) >"$copy/$name.log" 2>&1; then
      echo "$name: does not build, see $copy/$name.log"; bad=1
    elif (cd "$copy/tree" && cargo test $by) >"$copy/$name.log" 2>&1; then
      echo "$name: NOT found by cargo test $by"; bad=1
    else
      echo "$name: found by $(grep -oE '^test [a-z_:]+ \.\.\. FAILED' "$copy/$name.log" | sed 's/^test //; s/ \.\.\. FAILED//' | paste -sd' ')"
    fi
    continue
  fi
  if ! (cd "$copy/tree" && cargo test -q -p iop-tests --test sim --no-run) >"$copy/$name.log" 2>&1; then
    echo "$name: does not build, see $copy/$name.log"; bad=1; continue
  fi
  for which in fixed_seeds random_seeds; do
    (cd "$copy/tree" && IOP_SIM_SEEDS=$seeds IOP_SIM_START=$start cargo test -q -p iop-tests --test sim $which) >"$copy/$name.log" 2>&1 || break
  done
  found=$(grep -m1 -oE '^seed [0-9]+: .{0,110}' "$copy/$name.log")
  if [ -n "$found" ]; then
    echo "$name: found by $found"
  else
    echo "$name: NOT found by the fixed seeds, nor by $seeds from $start"; bad=1
  fi
  if [ $units = 1 ]; then
    (cd "$copy/tree" && cargo test -p iop-edge-core --lib) >"$copy/$name.units.log" 2>&1
    grep -oE '^test [a-z_:]+ \.\.\. FAILED' "$copy/$name.units.log" | sed 's/^test /    /; s/ \.\.\. FAILED//' | head -5
  fi
done
exit $bad
