#!/usr/bin/env bash
# ./run.sh OUT.jsonl "PEER..." ["SCENARIO..."] [REPS]
# Starts the mock upstream, then each peer (peers/NAME.sh), loads it, and appends one JSON line per measurement.
# The kit (upstream + load) is pinned to KIT_CPU and the peer to GW_CPU, so a peer always has one whole core.
# LOCK=file: hold that lock during every GROUP measurements, where other jobs run on the machine.
# Exit status: 0 all measured, 1 a peer was not ready or a measurement failed (the others still run), 2 usage.
set -u
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 2 ] || { sed -n '2s/^# /usage: /p' "$0" >&2; exit 2; }
OUT=$1; PEERS=$2; SCEN=${3:-"S4 S1a S1c S1b S2 S2c S3 S5b S5 S6"}; REPS=${4:-3}
: "${CARGO_TARGET_DIR:=$here/kit/target}" "${KIT_CPU:=0}" "${GW_CPU:=1}" "${UPSTREAM:=127.0.0.1:9100}" "${PORT:=9200}" "${LOCK:=/dev/null}" "${GROUP:=3}"
export CARGO_TARGET_DIR

args() { case $1 in
  S0)  echo --mode plain --conc 1 --reqs 20 --warmup 0 ;;                        # smoke
  S0s) echo --mode stream --conc 2 --n 20 --tps 100 --reqs 1 --warmup 0 ;;       # smoke
  S1c) args S1a ;;                                                               # S1a and S2 with everything on one
  S2c) args S2 ;;                                                                # core: no cross-core wake-ups
  S1a) echo --mode plain --conc 1 --secs 1 --warmup 0.3 ;;                       # added latency
  S1b) echo --mode plain --conc 64 --secs 2 --warmup 0.3 ;;                      # throughput
  S1o) echo --mode plain --conc 64 --rate 1000 --secs 3 --warmup 0.5 ;;          # latency at a fixed 1000 requests/s
  S2)  echo --mode stream --conc 64 --n "${S2_N:-200}" --tps 50 --reqs 1 --ramp-ms 200 --warmup 0.1 ;;
  S3)  echo --mode stream --conc 64 --n 500 --batch 16 --secs 2 --warmup 0.3 ;;
  S4)  echo --mode stream --conc 1000 --n 20 --tps 5 --reqs 1 --ramp-ms 1500 --warmup 0.1 ;;
  S5b) echo --mode stream --conc 16 --n 120 --tps 50 --reqs 1 --warmup 0.1 ;;    # the 16 fast streams of S5 alone
  S5)  echo "$(args S5b)" --slow 1 --slow-bps 1000 --up-addr "$UPSTREAM" ;;
  S6)  echo --mode plain --conc 8 --prompt 1048576 --secs 1.5 --warmup 0.2 ;;
  *)   return 1 ;;
esac; }

for s in $SCEN; do args "$s" >/dev/null || { echo "no scenario $s" >&2; exit 2; }; done
for p in $PEERS; do [ -f "$here/peers/$p.sh" ] || { echo "no peer $p (no file peers/$p.sh)" >&2; exit 2; }; done
for c in "$KIT_CPU" "$GW_CPU"; do taskset -c "$c" true || { echo "no CPU $c here (set KIT_CPU and GW_CPU)" >&2; exit 2; }; done
(cd "$here/kit" && cargo build -q --release --locked) || exit 1
BENCH=$CARGO_TARGET_DIR/release/bench
# shellcheck disable=SC2034 # peers/floor-*.sh use it
FLOOR=$CARGO_TARGET_DIR/release/floor
TMP=$(mktemp -d); ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
GW=(); UP=; status=0

exec 9>>"$LOCK"

# spawn COMMAND...: a process of the peer under test, in its own session, on its CPU.
# shellcheck disable=SC2317 # called by the peers
spawn() { setsid taskset -c "$GW_CPU" "$@" >"$TMP/gw.${#GW[@]}.log" 2>&1 9>&- & GW+=($!); }
stop_gw() { for p in "${GW[@]:-}"; do [ -n "$p" ] && kill -TERM -- "-$p" 2>/dev/null; done; sleep 0.3
  for p in "${GW[@]:-}"; do [ -n "$p" ] && kill -KILL -- "-$p" 2>/dev/null; wait "$p" 2>/dev/null; done; GW=(); rm -f "$TMP"/gw.*.log; }
trap 'stop_gw; [ -n "$UP" ] && kill "$UP" 2>/dev/null; rm -rf "$TMP"' EXIT
trap 'exit 130' INT TERM

# Moves every thread of the peer to one CPU.
repin() { for g in "${GW[@]:-}"; do [ -n "$g" ] && for p in $(ps -o pid= --sid "$g"); do taskset -a -p -c "$1" "$p" >/dev/null 2>&1; done; done; }

# load FLAG...: the load generator against the peer that is up.
load() { timeout 120 taskset -c "$KIT_CPU" "$BENCH" load --url "$URL" --model "$MODEL" --key "$KEY" "${EXTRA[@]}" "$@"; }
probe() { load --conc 1 --reqs 1 --warmup 0 --timeout 2; }

# What a table has to name beside its numbers.
cpu=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1)
printf '{"meta":{"date":"%s","cpu":"%s","cores":%s,"kernel":"%s","commit":"%s","kit_cpu":"%s","gw_cpu":"%s"}}\n' "$(date -u +%FT%TZ)" \
  "${cpu:-$(uname -m)}" "$(nproc)" "$(uname -sr)" "$(git -C "$here" describe --always --dirty 2>/dev/null)" "$KIT_CPU" "$GW_CPU" >> "$OUT"

for rep in $(seq "$REPS"); do
  for peer in $PEERS; do
    setsid taskset -c "$KIT_CPU" "$BENCH" upstream --listen "$UPSTREAM" 2>/dev/null 9>&- & UP=$!
    sleep 0.2
    kill -0 "$UP" 2>/dev/null || { echo "upstream could not listen on $UPSTREAM (set UPSTREAM and PORT)" >&2; exit 1; }
    MODEL=bench KEY=bench-key EXTRA=() URL='' SKIP=''; unset -f up
    # shellcheck disable=SC1090
    . "$here/peers/$peer.sh"
    ok=0
    if up; then
      for _ in $(seq 100); do
        if [ -n "$URL" ] && probe 2>/dev/null | grep -q '"reqs":1,"errs":0'; then ok=1; break; fi
        sleep 0.2
      done
    fi
    if [ $ok = 0 ]; then
      status=1; echo "$peer: not ready" >&2
      [ -n "$URL" ] && probe >&2
      [ ${#GW[@]} -gt 0 ] && tail -n 20 "$TMP"/gw.*.log >&2
    else
      k=0
      for s in $SCEN; do
        case " $SKIP " in *" $s "*) continue ;; esac
        pids=$(IFS=,; echo "${GW[*]:-}")
        [ $((k++ % GROUP)) = 0 ] && flock 9
        case $s in *c) repin "$KIT_CPU" ;; *) repin "$GW_CPU" ;; esac
        # shellcheck disable=SC2046
        if r=$(load --label "$s" --gw-pids "$pids" --up-pids "$UP" $(args "$s")) && [ -n "$r" ]; then
          echo "{\"peer\":\"$peer\",\"scen\":\"$s\",\"rep\":$rep,\"r\":$r}" >> "$OUT"
        else
          status=1; echo "$peer: $s gave no result" >&2
        fi
        [ $((k % GROUP)) = 0 ] && flock -u 9
      done
      flock -u 9
    fi
    stop_gw; kill "$UP" 2>/dev/null; wait "$UP" 2>/dev/null; UP=
  done
done
exit $status
