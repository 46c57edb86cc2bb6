#!/usr/bin/env bash
# Every rule id that stands in bold in docs/spec/*.md must be cited, in a comment or a string, by a test.
# Prints the ids that are not, one per line, and exits 1; prints a count when all are.
#
# What counts as a test:
#   - *.rs below a tests/ directory (integration tests, src/**/tests/), and files named tests.rs: all of it
#   - any other *.rs with #[cfg(test)]: from the first such line on, so that a rule cited only
#     beside the code it describes is not taken for tested
#   - tests/sdk/**/*.py and *.mjs: all of it
# An id is written whole (EXE-1, not a range); the hyphen keeps it from being a Rust name.
set -euo pipefail
export LC_ALL=C

cd "$(dirname "$0")/.."

id='[A-Z]{2,3}-[0-9]+'
skip=(--exclude-dir=target --exclude-dir=node_modules --exclude-dir=.venv --exclude-dir=.git)

# files DIR GREP-ARGUMENTS...: names of the files below DIR that match, none if DIR is absent
files() {
    local dir=$1
    shift
    [ -d "$dir" ] && grep -rl "${skip[@]}" "$@" "$dir" || true
}

whole_files() {
    files . -E "$id" --include='*.rs' | grep -E '/tests/|/tests\.rs$' || true
    files tests/sdk -E "$id" --include='*.py' --include='*.mjs'
}

cited() {
    local file
    {
        while IFS= read -r file; do
            grep -owE "$id" "$file" || true
        done < <(whole_files)
        while IFS= read -r file; do
            sed -n '/#\[cfg(test)\]/,$p' "$file" | grep -owE "$id" || true
        done < <(files . -F '#[cfg(test)]' --include='*.rs')
    } | sort -u
}

rules=$(grep -hoE "\*\*$id\*\*" docs/spec/*.md | sed 's/\*//g' | sort -u) || {
    printf 'check-rule-ids: no rule found in docs/spec\n' >&2
    exit 1
}
missing=$(comm -23 <(printf '%s\n' "$rules") <(cited))

if [ -n "$missing" ]; then
    printf '%s\n' "$missing"
    printf 'check-rule-ids: no test cites the %s rule(s) above\n' "$(grep -c . <<<"$missing")" >&2
    exit 1
fi
printf 'check-rule-ids: %s rules, each cited by a test\n' "$(grep -c . <<<"$rules")"
