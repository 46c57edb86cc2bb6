#!/usr/bin/env python3
"""table.py RESULTS.jsonl [BASE]: medians over repetitions as Markdown; ratios against BASE (default nginx)."""
import json
import statistics as st
import sys

if len(sys.argv) < 2:
    sys.exit(__doc__)
rows = {}
order = []
runs = []
for line in open(sys.argv[1]):
    d = json.loads(line)
    if "meta" in d:
        if d["meta"] not in runs:
            runs.append(d["meta"])
        continue
    rows.setdefault((d["scen"], d["peer"]), []).append(d["r"])
    if d["peer"] not in order:
        order.append(d["peer"])
base = sys.argv[2] if len(sys.argv) > 2 else "nginx"
for r in runs:
    print(f"Run of {r['date']}: {r['cpu']}, {r['cores']} cores, {r['kernel']}, commit {r['commit'] or 'unknown'}; kit on CPU {r['kit_cpu']}, peer on CPU {r['gw_cpu']}.")
if len(runs) > 1:
    print("\nSeveral runs in one file: ratios between peers of different runs mean nothing.")


def get(r, path):
    for k in path.split("."):
        r = r.get(k) if r else None
    return r


def med(scen, peer, path):
    v = [get(r, path) for r in rows.get((scen, peer), [])]
    v = [x for x in v if x is not None]
    return st.median(v) if v else None


def f(x):
    if x is None:
        return "-"
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


def over(a, b):
    return a / b if a and b else None


def table(scen, title, cols, ratio=None):
    ps = [p for p in order if (scen, p) in rows]
    if not ps:
        return
    print(f"\n**{scen}** {title}\n")
    heads = [c[0] for c in cols] + ([f"{ratio[0]} / {base}"] if ratio else []) + ["errors", "runs"]
    print("| peer | " + " | ".join(heads) + " |\n|---|" + "---|" * len(heads))
    for p in ps:
        cells = [f(c[1](scen, p)) for c in cols]
        if ratio:
            cells.append(f(over(ratio[1](scen, p), ratio[1](scen, base))))
        errs = sum(r["errs"] + r["short"] for r in rows[(scen, p)])
        print(f"| {p} | " + " | ".join(cells) + f" | {errs} | {len(rows[(scen, p)])} |")


def m(path, k=1.0):
    def g(s, p):
        v = med(s, p, path)
        return None if v is None else v * k

    return g


def rss_per_stream(s, p):
    rs = [r for r in rows.get((s, p), []) if r["gw_rss_peak_kb"]]
    low = min((r["gw_rss_idle_kb"] for r in rs), default=0)  # only runs on a fresh process count
    v = [(r["gw_rss_peak_kb"] - r["gw_rss_idle_kb"]) / r["conc"] for r in rs if r["gw_rss_idle_kb"] < 1.25 * low]
    return st.median(v) if v else None


def rss_growth(s, p):
    v = [(r["gw_rss_peak_kb"] - r["gw_rss_base_kb"]) for r in rows.get((s, p), []) if r["gw_rss_peak_kb"]]
    return st.median(v) / 1024 if v else None


lat = [("p50 us", m("lat_us.p50")), ("p99 us", m("lat_us.p99")), ("p99.9 us", m("lat_us.p999"))]
cpu = ("gw CPU us/req", m("gw_cpu_us_per_req"))
rel = [("relay p50 us", m("relay_us.p50")), ("relay p99 us", m("relay_us.p99")), ("p99.9 us", m("relay_us.p999"))]
alone = ("p50 / S5b", lambda s, p: over(med(s, p, "relay_us.p50"), med("S5b", p, "relay_us.p50")))
jit = [("jitter p50 us", m("jitter_us.p50")), ("jitter p99 us", m("jitter_us.p99"))]
mtok = ("gw CPU s/Mtok", m("gw_cpu_s_per_mtok"))
table("S0", "smoke: 20 non-stream requests, C=1", lat + [cpu])
table("S0s", "smoke: 2 streams x 100 tok/s x 20 tokens", rel + [mtok])
table("S1a", "non-stream 1 KB, C=1, gateway on its own core", lat + [cpu], ("p50", m("lat_us.p50")))
table("S1c", "non-stream 1 KB, C=1, everything on one core", lat + [cpu], ("p50", m("lat_us.p50")))
table("S1b", "non-stream 1 KB, C=64, gateway has one core", [("req/s", m("rps"))] + lat[:2] + [cpu, ("gw RSS peak MB", m("gw_rss_peak_kb", 1 / 1024))], ("req/s", m("rps")))
table("S1o", "non-stream 1 KB, open loop 1000 req/s", lat + [cpu], ("p99", m("lat_us.p99")))
table("S2", "64 streams x 50 tok/s x 200 tokens, gateway on its own core", rel + jit + [("TTFT p50 us", m("ttft_us.p50")), mtok], ("relay p50", m("relay_us.p50")))
table("S2c", "the same, everything on one core", rel + jit + [mtok], ("relay p50", m("relay_us.p50")))
table("S3", "64 streams as fast as possible, 500 tokens each, 16 events per upstream write", [("tok/s", m("tok_s")), mtok], ("tok/s", m("tok_s")))
table("S4", "1000 streams x 5 tok/s", rel + [mtok, ("gw RSS KB/stream", rss_per_stream), ("gw RSS peak MB", m("gw_rss_peak_kb", 1 / 1024))], ("relay p99", m("relay_us.p99")))
table("S5", "16 streams x 50 tok/s beside one reader of 1 KB/s on a firehose", rel + [alone, ("gw RSS growth MB", rss_growth), ("held in path KB", m("held_kb"))], ("relay p99", m("relay_us.p99")))
table("S5b", "the 16 streams of S5 without the slow reader", rel + [mtok], ("relay p99", m("relay_us.p99")))
table("S6", "non-stream, 1 MiB request body, C=8", [("req/s", m("rps"))] + lat[:2] + [("gw CPU ms/req", m("gw_cpu_us_per_req", 1e-3)), ("gw RSS peak MB", m("gw_rss_peak_kb", 1 / 1024))], ("req/s", m("rps")))
