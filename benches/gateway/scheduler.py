#!/usr/bin/env python3
"""./scheduler.py OUT.jsonl [SCENARIO...] [--reps N] [--secs S]

What the Edge's scheduler does with more than there is room for. Scenarios:
  overload   four times the capacity, by the clock: what the admitted ones take, and how fast the others are refused
  fairness   64 clients of one principal beside 2 of another: alone, with fair turns, and as one principal (first come, first served)
  register   1,000 Nodes (NODES) in one process dial one Edge over TLS at once, and over plain TCP

Appends JSON lines to OUT and prints Markdown tables of medians with the raw values. Needs OpenSSL 3, iop-edge, iop-node and
iop-swarm (IOP_BIN, default ../../target/release) and the kit (CARGO_TARGET_DIR, default kit/target). KIT_CPU (0) and GW_CPU (1) as in run.sh.
"""
import argparse, base64, hashlib, json, os, re, secrets, statistics, subprocess, sys, tempfile, time, urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
BIN = os.path.abspath(os.environ.get("IOP_BIN", HERE + "/../../target/release"))
BENCH = os.path.join(os.environ.get("CARGO_TARGET_DIR", HERE + "/kit/target"), "release/bench")
KIT_CPU, GW_CPU = os.environ.get("KIT_CPU", "0"), os.environ.get("GW_CPU", "1")
UPSTREAM = os.environ.get("UPSTREAM", "127.0.0.1:9100")


def secret():
    return base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")


def hashed(text):
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def certificates(folder):
    """A CA, and a certificate of it for 127.0.0.1."""
    run = lambda *args: subprocess.run(("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                                        *args), cwd=folder, check=True, stderr=subprocess.DEVNULL)
    run("-subj", "/CN=bench CA", "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        "-keyout", "ca-key.pem", "-out", "ca.pem")
    run("-subj", "/CN=bench edge", "-CA", "ca.pem", "-CAkey", "ca-key.pem", "-addext", "basicConstraints=critical,CA:FALSE",
        "-addext", "keyUsage=critical,digitalSignature", "-addext", "extendedKeyUsage=serverAuth",
        "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", "edge-key.pem", "-out", "edge.pem")


class Fleet:
    """An Edge with this config, and what belongs to it. A `with` block ends all of it."""

    def __init__(self, yaml, tls):
        self.dir, self.procs = tempfile.TemporaryDirectory(), []
        self.tls = tls
        if tls:
            certificates(self.dir.name)
            yaml += "tls: { nodes: { cert: edge.pem, key: edge-key.pem } }\n"
        yaml += "listen: { openai: 127.0.0.1:0, nodes: 127.0.0.1:0, admin: 127.0.0.1:0 }\n"
        with open(self.dir.name + "/edge.yaml", "w") as f:
            f.write(yaml)
        os.chmod(self.dir.name + "/edge.yaml", 0o600)
        edge = self.spawn(GW_CPU, BIN + "/iop-edge", "serve", "--config", "edge.yaml", env={"IOP_LOG": "error"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in edge.stdout:
            if found := re.search(r"listening openai=\S+?//(\S+) nodes=\S+?//(\S+) admin=\S+?//(\S+)", line):
                self.openai, self.nodes, self.admin = found.groups()
                break
        else:
            sys.exit("iop-edge did not start")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for proc in self.procs:
            proc.kill()
            proc.wait()
        self.dir.cleanup()

    def spawn(self, cpu, *args, **kw):
        kw["env"] = {**os.environ, **kw.get("env", {})}
        proc = subprocess.Popen(("taskset", "-c", cpu, *args), cwd=self.dir.name, **kw)
        self.procs.append(proc)
        return proc

    def node(self, token):
        path = self.dir.name + "/node.token"
        with open(path, "w") as f:
            f.write(token + "\n")
        os.chmod(path, 0o600)
        scheme, ca = ("https", ("--ca", "ca.pem")) if self.tls else ("http", ())
        self.spawn(GW_CPU, BIN + "/iop-node", "serve", "--edge", f"{scheme}://{self.nodes}", "--token-file", path, *ca, env={"IOP_LOG": "error"},
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://{self.openai}/readyz")
                return
            except OSError:
                time.sleep(0.05)
        sys.exit("iop-node did not become ready")


def crowd(fleet, secs, lo, hi, *classes):
    flags = [flag for c in classes for flag in ("--class", c)]
    out = subprocess.run(("taskset", "-c", KIT_CPU, BENCH, "crowd", "--url", f"http://{fleet.openai}/v1", "--lo-ms", str(lo), "--hi-ms", str(hi),
                          "--secs", str(secs), "--warmup", "1.5", *flags), check=True, capture_output=True, text=True).stdout
    return json.loads(out)


def config(places, queue, keys, node):
    """One Node with one provider of so many places."""
    api = ", ".join(f'{{ id: "{id}", hash: "{hashed(key)}", principal: {principal} }}' for id, key, principal in keys)
    return f"""auth: {{ api_keys: [ {api} ] }}
nodes:
  - id: bench
    token_id: benchnod
    token_hash: "{hashed(node)}"
    providers: [ {{ id: bench, kind: openai_compat, base_url: "http://{UPSTREAM}", capacity: {places} }} ]
models: [ {{ name: bench, candidates: [ {{ provider: bench, target: bench }} ] }} ]
queue: {{ max_waiting: {queue}, timeout_ms: 30000 }}
limits: {{ connections: 8192, connections_per_address: 8192 }}
"""


PLACES, MEAN_MS = 32, 40


def overload(secs):
    """Places 32, answers in 40 ms: 800 requests/s fit, 3,200 are asked. A short queue and a long one."""
    result = {}
    for queue in (8, 256):
        key, node = secret(), secret()
        with Fleet(config(PLACES, queue, [("benchkey", key, "bench")], node), True) as fleet:
            fleet.node("iopn_benchnod_" + node)
            full = "iopk_benchkey_" + key
            result[f"unloaded {queue}"] = crowd(fleet, secs, MEAN_MS, MEAN_MS, f"all,{full},rate=80")["all"]
            result[f"4x {queue}"] = crowd(fleet, secs, MEAN_MS, MEAN_MS, f"all,{full},rate={4 * PLACES * 1000 // MEAN_MS}")["all"]
    return result


def fairness(secs):
    """Answers take 20 to 60 ms, evenly spread. The modest principal alone, beside a greedy one, and as the same principal."""
    result = {}
    for places in (32, 16):
        node, modest, greedy, same = secret(), secret(), secret(), secret()
        keys = [("modest00", modest, "modest"), ("greedy00", greedy, "greedy"), ("samekey0", same, "greedy")]
        with Fleet(config(places, 1024, keys, node), True) as fleet:
            fleet.node("iopn_benchnod_" + node)
            name = lambda id, key: f"iopk_{id}_{key}"
            small, fifo = f"modest,{name('modest00', modest)},conc=2", f"modest,{name('samekey0', same)},conc=2"
            large = f"greedy,{name('greedy00', greedy)},conc=64"
            result[f"{places} alone"] = crowd(fleet, secs, 20, 60, small)
            result[f"{places} fair"] = crowd(fleet, secs, 20, 60, small, large)
            result[f"{places} fifo"] = crowd(fleet, secs, 20, 60, fifo, large)
    return result


def register(_secs):
    """All at once: time from the first dial until all are ready."""
    count, result = int(os.environ.get("NODES", "1000")), {}
    for tls in (True, False):
        tokens = [secret() for _ in range(count)]
        nodes = "\n".join(f'  - {{ id: n{i}, token_id: "n{i:07}", token_hash: "{hashed(t)}", providers: [ {{ id: p{i}, kind: demo }} ] }}'
                          for i, t in enumerate(tokens))
        candidates = ", ".join(f"{{ provider: p{i}, target: iop-demo }}" for i in range(count))
        with Fleet(f"nodes:\n{nodes}\nmodels: [ {{ name: iop-demo, candidates: [ {candidates} ] }} ]\n", tls) as fleet:
            with open(fleet.dir.name + "/tokens", "w") as f:
                f.write("".join(f"iopn_n{i:07}_{t}\n" for i, t in enumerate(tokens)))
            cpu = lambda: sum(map(int, open(f"/proc/{fleet.procs[0].pid}/stat").read().rsplit(")", 1)[1].split()[11:13])) / os.sysconf("SC_CLK_TCK")
            before = cpu()
            swarm = fleet.spawn(KIT_CPU, BIN + "/iop-swarm", fleet.nodes, "tokens", *(("ca.pem",) if tls else ()), stdout=subprocess.PIPE, text=True)
            line = json.loads(swarm.communicate(timeout=300)[0])
            result["TLS" if tls else "plain"] = {**line, "edge_cpu_s": round(cpu() - before, 2)}
    return result


ms = lambda us: None if us is None else us / 1000
COLUMNS = {
    "overload": [("served/s", lambda r: r["ok_s"]), ("total p50 ms", lambda r: ms(r["total_us"]["p50"])), ("total p99 ms", lambda r: ms(r["total_us"]["p99"])),
                 ("after admission p50 ms", lambda r: ms(r["service_us"]["p50"])), ("after admission p99 ms", lambda r: ms(r["service_us"]["p99"])),
                 ("refused/s", lambda r: r["refused_s"]), ("refused p50 ms", lambda r: ms((r["refused_us"] or {}).get("p50"))),
                 ("refused p99 ms", lambda r: ms((r["refused_us"] or {}).get("p99"))), ("refused max ms", lambda r: ms((r["refused_us"] or {}).get("max"))),
                 ("without retry-after", lambda r: r["refused"] - r["retry_after"]), ("errors", lambda r: r["errs"])],
    "fairness": [("modest req/s", lambda r: r["modest"]["ok_s"]), ("modest p50 ms", lambda r: ms(r["modest"]["total_us"]["p50"])),
                 ("modest p99 ms", lambda r: ms(r["modest"]["total_us"]["p99"])), ("modest before provider p99 ms", lambda r: ms(r["modest"]["before_us"]["p99"])),
                 ("greedy req/s", lambda r: r.get("greedy", {}).get("ok_s")), ("errors", lambda r: sum(c["errs"] + c["refused"] for c in r.values()))],
    "register": [("nodes", lambda r: r["nodes"]), ("first s", lambda r: r["first_s"]), ("p50 s", lambda r: r["p50_s"]), ("p90 s", lambda r: r["p90_s"]),
                 ("all s", lambda r: r["all_s"]), ("edge CPU s", lambda r: r["edge_cpu_s"])],
}


def table(scenario, runs):
    columns = COLUMNS[scenario]
    print(f"\n**{scenario}**, medians of {len(runs)} (single runs in brackets)\n\n| |", " | ".join(name for name, _ in columns), "|\n|---|" + "---|" * len(columns))
    for row in runs[0]:
        cells = []
        for _, value in columns:
            values = [value(run[row]) for run in runs]
            if values[0] is None:
                cells.append("-")
                continue
            show = lambda v: f"{v:,.0f}" if v >= 100 or v == int(v) else f"{v:.1f}" if v >= 10 else f"{v:.2f}"
            cells.append(show(statistics.median(values)) + (f" ({', '.join(map(show, values))})" if len(set(map(show, values))) > 1 else ""))
        print(f"| {row} |", " | ".join(cells), "|")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("scenarios", nargs="*")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--secs", type=float, default=20)
    args = parser.parse_args()
    all_of = {"overload": overload, "fairness": fairness, "register": register}
    names = args.scenarios or list(all_of)
    if unknown := set(names) - set(all_of):
        sys.exit(f"no scenario {', '.join(unknown)}")
    runs = {name: [] for name in names}
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    commit = subprocess.run(("git", "-C", HERE, "describe", "--always", "--dirty"), capture_output=True, text=True).stdout.strip()
    print(f"Run of {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}: {cpu}, {os.cpu_count()} cores, {os.uname().sysname} {os.uname().release}, "
          f"commit {commit}, load average {os.getloadavg()[0]:.2f} before; kit on CPU {KIT_CPU}, Edge and Node on CPU {GW_CPU}.")
    upstream = subprocess.Popen(("taskset", "-c", KIT_CPU, BENCH, "upstream", "--listen", UPSTREAM), stderr=subprocess.DEVNULL)
    try:
        for rep in range(args.reps):
            for name in names:
                result = all_of[name](args.secs)
                if name == "overload":
                    for row in result.values():
                        row["refused_s"] = row["refused"] / args.secs
                runs[name].append(result)
                with open(args.out, "a") as f:
                    f.write(json.dumps({"scenario": name, "rep": rep, "load": os.getloadavg()[0], "r": result}) + "\n")
    finally:
        upstream.kill()
        upstream.wait()
    for name in names:
        table(name, runs[name])


main()
