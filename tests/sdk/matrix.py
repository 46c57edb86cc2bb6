#!/usr/bin/env python3
"""Unmodified clients x the cases of fault_server.py x both wires x streamed and whole, through iop-edge and iop-node.

Proves API-2.
usage: matrix.py --python PYTHON --node DIR [--rust BINARY] [--bin target/debug] [--clients a,b] [--wires tunnel,run]
                 [--modes stream,whole] [--cases a,b] [--jobs N] [--markdown]
PYTHON has openai, langchain-openai and litellm, DIR has node_modules (README.md, "All clients"). What is not given is left out.
A stalled provider is ended by the Node after 4 s here, so that no client has to wait for its own timeout.
One line per client, wire and mode, then every outcome that must not be: silent_loss, hang, crash. Exit status 1 if there is one."""
import argparse, collections, concurrent.futures, os, re, socket, subprocess, sys, tempfile, time, urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
PYTHON = {"openai-python": [], "openai-python async": ["--use-async"], "langchain-openai": ["--lib", "langchain"], "litellm": ["--lib", "litellm"],
          "openai-python responses": ["--responses"]}
NODE = {"openai-node": "openai", "ai-sdk openai chat": "aisdk-chat", "ai-sdk openai-compatible": "compat",
        "ai-sdk openai responses": "aisdk-responses", "ai-sdk open-responses": "open-responses", "@langchain/openai": "langchain",
        "openai-node responses": "openai"}
# These ask for every chat case as a response: the Edge makes it of the provider's chat.
RESPONSES = {"openai-node responses", "ai-sdk openai responses", "ai-sdk open-responses"}
RUST = "async-openai"

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("--python"); ap.add_argument("--node"); ap.add_argument("--rust")
ap.add_argument("--bin", default=os.path.join(HERE, "../../target/debug"))
ap.add_argument("--clients"); ap.add_argument("--wires", default="tunnel,run"); ap.add_argument("--modes", default="stream,whole")
ap.add_argument("--cases"); ap.add_argument("--jobs", type=int, default=2); ap.add_argument("--markdown", action="store_true")
a = ap.parse_args()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(url, key, what, processes):
    for _ in range(300):
        for process in processes:
            if process.poll() is not None: sys.exit(f"{what} ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": "Bearer " + key}), timeout=2) as answer:
                if answer.status == 200: return
        except OSError: pass
        time.sleep(0.1)
    sys.exit(f"{what} is not ready after 30 s")


def start(args, log):
    return subprocess.Popen(args, stdout=log, stderr=subprocess.STDOUT)


class Fleet:
    """An Edge and a Node over one wire, in a folder of their own."""

    def __init__(self, work, wire, upstream):
        folder = os.path.join(work, wire)
        told = subprocess.run([os.path.join(a.bin, "iop"), "init", "--dir", folder], check=True, capture_output=True, text=True).stdout
        self.key = re.search(r"iopk_\S+", told).group(0)
        port, nodes, admin = free_port(), free_port(), free_port()
        self.base = f"http://127.0.0.1:{port}"
        path = os.path.join(folder, "edge.yaml")
        with open(path) as file: config = file.read()
        config = config.replace("127.0.0.1:8180", f"127.0.0.1:{port}").replace("127.0.0.1:8443", f"127.0.0.1:{nodes}").replace("127.0.0.1:9190", f"127.0.0.1:{admin}")
        config = re.sub(r"  openai: \{ cert.*\n", "", config)
        mode = "auto" if wire == "tunnel" else "run"
        config = re.sub(r"      - \{ id: demo.*\n.*\n", f'      - {{ id: fault, kind: openai_compat, base_url: "{upstream}", capacity: 256, wire: {mode}, response_stall_timeout_ms: 4000 }}\n', config)
        with open(path, "w") as file: file.write(config + "recovery: { max_extra_attempts: 0 }\n")
        self.log = open(os.path.join(folder, "log"), "w")
        edge = start([os.path.join(a.bin, "iop-edge"), "serve", "--config", path], self.log)
        node = start([os.path.join(a.bin, "iop-node"), "serve", "--edge", f"https://127.0.0.1:{nodes}", "--token-file", os.path.join(folder, "node.token"), "--ca", os.path.join(folder, "certs/ca.pem")], self.log)
        self.processes = [edge, node]
        wait_for(self.base + "/v1/models/ok", self.key, f"the fleet for {wire}", self.processes)


def command(client, fleet, mode, wire):
    """How a client is run; None if it is not there."""
    options = ["--key", fleet.key]
    if mode == "whole": options += ["--no-stream"] + (["--upstream-streams"] if wire == "run" else [])
    if client in PYTHON and a.python:
        cases = ["--cases", a.cases] if a.cases else []
        return [a.python, os.path.join(HERE, "sdk_python.py"), "--base", fleet.base + "/v1", *PYTHON[client], *cases, *options], None
    if client in NODE and a.node:
        return ["node", os.path.join(HERE, "sdk_node.mjs"), NODE[client], fleet.base + "/v1", *([a.cases] if a.cases else []), *(["--responses"] if client in RESPONSES else []), *options], a.node
    if client == RUST and a.rust:
        return [a.rust, fleet.base + "/v1", "--expected", a.expected, *(a.cases.split(",") if a.cases else []), *options], None
    return None


def run(job):
    client, wire, mode, fleet = job
    args, folder = command(client, fleet, mode, wire)
    done = subprocess.run(args, cwd=folder, capture_output=True, text=True)
    lines = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") >= 2]
    if not lines: lines = [["(start)", "crash", (done.stderr or "no output").strip().splitlines()[-1]]]
    return client, wire, mode, lines


def main():
    running = []
    with tempfile.TemporaryDirectory() as work:
        try:
            port = free_port()
            running.append(start([sys.executable, os.path.join(HERE, "fault_server.py"), "--port", str(port)], subprocess.DEVNULL))
            wait_for(f"http://127.0.0.1:{port}/v1/models", "", "fault_server.py", running)
            a.expected = os.path.join(work, "expected.json")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/expected") as answer, open(a.expected, "wb") as file: file.write(answer.read())
            fleets = {wire: Fleet(work, wire, f"http://127.0.0.1:{port}") for wire in a.wires.split(",")}
            for fleet in fleets.values(): running += fleet.processes
            clients = a.clients.split(",") if a.clients else [*PYTHON, *NODE, RUST]
            jobs = [(client, wire, mode, fleets[wire]) for client in clients for wire in fleets for mode in a.modes.split(",")]
            jobs = [job for job in jobs if command(job[0], job[3], job[2], job[1])]
            if not jobs: sys.exit("no client: give --python, --node or --rust")
            bad = []
            print("| client | wire | mode | cases | ok | typed error | silent loss, hang, crash |\n| --- | --- | --- | --- | --- | --- | --- |" if a.markdown else "client, wire, mode: outcomes")
            with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
                for client, wire, mode, lines in pool.map(run, jobs):
                    counts = collections.Counter(line[1] for line in lines)
                    wrong = [line for line in lines if line[1] not in ("ok", "typed_error")]
                    bad += [(client, wire, mode, line) for line in wrong]
                    if a.markdown: print(f"| {client} | {wire} | {mode} | {len(lines)} | {counts['ok']} | {counts['typed_error']} | {len(wrong)} |", flush=True)
                    else: print(f"{client}, {wire}, {mode}: {dict(sorted(counts.items()))}", flush=True)
            for client, wire, mode, (case, outcome, *detail) in bad: print(f"BAD {client}, {wire}, {mode}: {case} {outcome} {' '.join(detail)[:300]}")
            return 1 if bad else 0
        finally:
            for process in running: process.terminate()
            for process in running: process.wait()


if __name__ == "__main__": sys.exit(main())
