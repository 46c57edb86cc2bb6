#!/usr/bin/env python3
"""Smoke test of an OpenAI base URL with the official openai Python SDK; every check has to pass.

usage: smoke_python.py [--base http://127.0.0.1:8180/v1] [--model iop-demo] [--key K] [--timeout S] [--only check,check]
One line per check, `ok name` or `FAIL name detail`; exit status 1 if any failed.
Needs a model that calls tools and thinks when asked to, as iop-demo does. smoke_node.mjs has the same checks.
"""
import argparse
import json
import sys

import openai

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("--base", default="http://127.0.0.1:8180/v1")
ap.add_argument("--model", default="iop-demo")
ap.add_argument("--key", default="iop")
ap.add_argument("--timeout", type=float, default=30)
ap.add_argument("--only", type=lambda s: s.split(","))
args = ap.parse_args()

client = openai.OpenAI(base_url=args.base, api_key=args.key, timeout=args.timeout, max_retries=0)
ASK = [{"role": "user", "content": "Say something about the sea."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHECKS = []


def check(f):
    CHECKS.append(f)
    return f


def need(ok, detail):
    # not `assert`, which python -O leaves out
    if not ok:
        raise AssertionError(detail)


def chat(**more):
    limit = {} if "max_completion_tokens" in more else {"max_tokens": 256}  # for a model that would not end
    return client.chat.completions.create(**{"model": args.model, "messages": ASK, "temperature": 0, **limit, **more})


def stream(**more):
    chunks = list(chat(stream=True, **more))
    need(chunks, "no chunks")
    need(len({c.id for c in chunks}) == 1, f"several ids: {sorted({c.id for c in chunks})}")
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    need(len(ends) == 1, f"finish reasons {ends}")
    return chunks, ends[0]


def deltas(chunks):
    return [c.choices[0].delta for c in chunks if c.choices]


def joined(chunks, field="content"):
    return "".join(getattr(d, field, None) or "" for d in deltas(chunks))


def refusal(kind, call):
    """The SDK error that `call` ends in: exactly of class `kind`, with an error object of OpenAI's shape."""
    try:
        call()
    except openai.OpenAIError as e:
        need(type(e) is kind, f"{type(e).__name__} instead of {kind.__name__}: {e}")
        # from the body, because the SDK turns a number in `code` into a string
        shaped = isinstance(e.body, dict) and set(e.body) == {"message", "type", "param", "code"}
        need(shaped and isinstance(e.body["code"], (str, type(None))), f"error object {e.body}")
        return e
    raise AssertionError(f"no error instead of {kind.__name__}")


@check
def models_list():
    ids = [m.id for m in client.models.list()]
    need(args.model in ids, f"{args.model} is not among {ids}")


@check
def model_retrieve():
    m = client.models.retrieve(args.model)
    need((m.id, m.object) == (args.model, "model"), repr(m))


@check
def chat_plain():
    r = chat()
    choice = r.choices[0]
    need(r.object == "chat.completion" and r.model == args.model, f"{r.object} of {r.model}")
    need(choice.message.role == "assistant" and choice.message.content, repr(choice.message))
    need(choice.finish_reason == "stop", f"finish reason {choice.finish_reason}")
    u = r.usage
    need(u and u.completion_tokens > 0 and u.total_tokens == u.prompt_tokens + u.completion_tokens, repr(u))


@check
def stream_with_usage():
    chunks, end = stream(stream_options={"include_usage": True})
    need(joined(chunks) and end == "stop", f"text {joined(chunks)!r}, finish reason {end}")
    with_usage = [c for c in chunks if c.usage]
    need(with_usage == chunks[-1:] and not chunks[-1].choices, f"usage in {len(with_usage)} chunks, last: {chunks[-1]!r}")
    u = chunks[-1].usage
    need(u.completion_tokens > 0 and u.total_tokens == u.prompt_tokens + u.completion_tokens, repr(u))


@check
def stream_without_usage():
    chunks, end = stream()
    need(joined(chunks) and end == "stop", f"text {joined(chunks)!r}, finish reason {end}")
    need(not any(c.usage for c in chunks), "usage that nobody asked for")
    need(all(c.choices for c in chunks), "a chunk without choices")


def check_call(name, arguments, call_id, end):
    need(name == "get_weather" and call_id, f"call {name!r}, id {call_id!r}")
    need(isinstance(json.loads(arguments), dict), f"arguments {arguments!r}")
    need(end == "tool_calls", f"finish reason {end}")


@check
def tool_call_plain():
    choice = chat(tools=[WEATHER], tool_choice="required").choices[0]
    need(choice.message.tool_calls, f"no tool call: {choice!r}")
    call = choice.message.tool_calls[0]
    check_call(call.function.name, call.function.arguments, call.id, choice.finish_reason)


@check
def tool_call_stream():
    chunks, end = stream(tools=[WEATHER], tool_choice="required")
    parts = [t for d in deltas(chunks) for t in d.tool_calls or []]
    need(parts, "no tool call delta")
    need({t.index for t in parts} == {0}, f"indexes {[t.index for t in parts]}")
    text = lambda pick: "".join(pick(t) or "" for t in parts)
    check_call(text(lambda t: t.function.name), text(lambda t: t.function.arguments), text(lambda t: t.id), end)


@check
def reasoning():
    chunks, _ = stream(reasoning_effort="low")
    content, text = joined(chunks, "reasoning_content"), joined(chunks, "reasoning")
    need(content and text, f"reasoning_content {content!r}, reasoning {text!r}")
    need(content == text, "reasoning_content and reasoning differ")
    need(joined(chunks), "no text after the reasoning")


@check
def unknown_model():
    e = refusal(openai.NotFoundError, lambda: chat(model="no-such-model"))
    need(e.code == "model_not_found" and e.type == "invalid_request_error" and e.param == "model", f"{e.body}")


@check
def unknown_model_stream():
    e = refusal(openai.NotFoundError, lambda: list(chat(model="no-such-model", stream=True)))
    need(e.code == "model_not_found", f"{e.body}")


@check
def malformed():
    post = lambda body: lambda: client.post("/chat/completions", cast_to=object, body=body)
    for body in (
        {"model": args.model},
        {"model": args.model, "messages": []},
        {"model": args.model, "messages": "hello"},
        {"model": args.model, "messages": ASK, "stream": "yes"},
        {"messages": ASK},
    ):
        e = refusal(openai.BadRequestError, post(body))
        need(e.type == "invalid_request_error", f"{e.body} for {sorted(body)}")


@check
def request_ids():
    ids = [chat(max_tokens=1)._request_id, chat(max_tokens=1)._request_id]
    with client.chat.completions.with_streaming_response.create(model=args.model, messages=ASK, max_tokens=1, stream=True) as r:
        ids.append(r.headers.get("x-request-id"))
        r.read()
    ids.append(refusal(openai.NotFoundError, lambda: chat(model="no-such-model")).request_id)
    need(all(ids) and len(set(ids)) == len(ids), f"request ids {ids}")


@check
def stop_sequence():
    full = chat().choices[0].message.content
    words = full.split()
    need(len(words) > 3, f"too short to stop in: {full!r}")
    stop = words[len(words) // 2]
    wanted = full[: full.index(stop)].rstrip()
    choice = chat(stop=[stop]).choices[0]
    need(choice.message.content.rstrip() == wanted, f"{choice.message.content!r} instead of {wanted!r}")
    need(choice.finish_reason == "stop", f"finish reason {choice.finish_reason}")
    chunks, end = stream(stop=stop)
    need(joined(chunks).rstrip() == wanted, f"streamed {joined(chunks)!r} instead of {wanted!r}")
    need(end == "stop", f"streamed finish reason {end}")


@check
def max_tokens():
    for name in ("max_tokens", "max_completion_tokens"):
        r = chat(**{name: 3})
        need(r.choices[0].finish_reason == "length", f"{name}: finish reason {r.choices[0].finish_reason}")
        need(r.usage.completion_tokens <= 3, f"{name}: {r.usage.completion_tokens} tokens")
        _, end = stream(**{name: 3})
        need(end == "length", f"{name}: streamed finish reason {end}")


names = [f.__name__ for f in CHECKS]
if unknown := set(args.only or []) - set(names):
    ap.error(f"no check {sorted(unknown)}; there are {names}")
failed = False
for f in CHECKS:
    if args.only and f.__name__ not in args.only:
        continue
    try:
        f()
    except Exception as e:
        failed = True
        print("FAIL", f.__name__, " ".join(f"{type(e).__name__}: {e}".split())[:400], flush=True)
    else:
        print("ok", f.__name__, flush=True)
sys.exit(failed)
