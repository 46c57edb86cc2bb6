#!/usr/bin/env python3
"""A provider that does what a client asks for, deterministically: text, tool calls, images and files, n, logprobs, JSON, usage; chats, completions, embeddings.

Standard library only. usage: scripted_provider.py [--port 8091] [--bare]
--bare leaves out what OpenAI's document requires and many servers do not send: refusal, logprobs, the content beside calls, details of usage.
It answers as the model `scripted`, any other is a 404 in vLLM's form. There is no /v1/responses: a gateway has to make it of the chat."""
import argparse, base64, json, struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "scripted"


def wrong(status, message, kind="BadRequestError"): return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


def fitting(schema):
    """A value that a JSON schema allows, for the schemas that the checks use."""
    if "enum" in schema: return schema["enum"][0]
    kind = schema.get("type")
    if kind == "object" or "properties" in schema: return {name: fitting(part) for name, part in schema.get("properties", {}).items()}
    return {"string": "San Francisco", "integer": 1, "number": 1.5, "boolean": True, "array": [], "null": None}.get(kind, "x")


def seen(messages):
    """What the messages hold, by kind; an image or a file must carry its data."""
    kinds = []
    for message in messages:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else []:
            kind = part.get("type")
            if kind == "image_url" and not part["image_url"]["url"].startswith(("data:", "http")): raise ValueError("an image without data")
            if kind == "file" and not part["file"].get("file_data"): raise ValueError("a file without data")
            kinds.append(kind)
    return [kind for kind in kinds if kind != "text"]


def answer(body):
    """What one choice says: words, and calls."""
    messages, tools, choice = body["messages"], body.get("tools") or [], body.get("tool_choice", "auto")
    others = seen(messages)
    named = choice["function"]["name"] if isinstance(choice, dict) and "function" in choice else None
    if tools and choice != "none" and (named or choice == "required" or messages[-1].get("role") == "user"):
        tool = next((tool["function"] for tool in tools if tool["function"]["name"] == named), tools[0]["function"])
        return "", [(tool["name"], json.dumps(fitting(tool.get("parameters") or {}), ensure_ascii=False))]
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema": return json.dumps(fitting(form["json_schema"]["schema"])), []
    return f"I see {len(messages)} messages" + (f" and {' and '.join(others)}" if others else "") + ", Hé 日本.", []


def usage_of(messages, words, bare):
    asked, said = sum(len(json.dumps(message).split()) for message in messages), len(words)
    usage = {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
    return usage if bare else {**usage, "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}


def chat(body, bare):
    """Status and either one object or the list of a stream's events."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 1000
    text, calls = answer(body)
    words = text.split(" ") if text else []
    cut, words = len(words) > limit, words[:limit]
    finish = "tool_calls" if calls else "length" if cut else "stop"
    pieces = [word if at == 0 else " " + word for at, word in enumerate(words)]
    count, base = body.get("n") or 1, {"id": "chatcmpl-1", "created": 1, "model": MODEL}
    usage = usage_of(body["messages"], words, bare)
    token = lambda piece: {"token": piece, "logprob": -0.5, "bytes": list(piece.encode()), "top_logprobs": []}
    logprobs = lambda some: {"content": [token(piece) for piece in some], **({} if bare else {"refusal": None})} if body.get("logprobs") else None
    tool_calls = [{"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}} for at, (name, arguments) in enumerate(calls)]
    if not body.get("stream"):
        message = {"role": "assistant"}
        if text or not bare: message["content"] = "".join(pieces) or None
        if tool_calls: message["tool_calls"] = tool_calls
        if not bare: message["refusal"] = None
        choices = [{"index": at, "message": message, "finish_reason": finish} for at in range(count)]
        if not bare or body.get("logprobs"): choices = [{**choice, "logprobs": logprobs(pieces)} for choice in choices]
        return 200, {**base, "object": "chat.completion", "choices": choices, "usage": usage}
    deltas = [({"role": "assistant", "content": ""}, None, [])]
    deltas += [({"content": piece}, None, [piece]) for piece in pieces]
    for at, call in enumerate(tool_calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        half = len(arguments) // 2
        deltas.append(({"tool_calls": [{"index": at, **call, "function": {"name": name, "arguments": ""}}]}, None, []))
        deltas += [({"tool_calls": [{"index": at, "function": {"arguments": part}}]}, None, []) for part in (arguments[:half], arguments[half:])]
    deltas.append(({}, finish, []))
    chunk = lambda choices, **more: {**base, "object": "chat.completion.chunk", "choices": choices, **more}
    events = [chunk([{"index": at, "delta": delta, "finish_reason": end, **({"logprobs": logprobs(some)} if body.get("logprobs") and some else {})}])
              for delta, end, some in deltas for at in range(count)]
    if (body.get("stream_options") or {}).get("include_usage"): events.append(chunk([], usage=usage))
    return 200, events


def completions(body, bare):
    words = "It goes on.".split(" ")[: body.get("max_tokens") or 16]
    pieces = [word if at == 0 else " " + word for at, word in enumerate(words)]
    base, usage = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}, usage_of([body.get("prompt", "")], words, bare)
    choice = lambda text, finish: {"index": 0, "text": text, "finish_reason": finish, **({} if bare else {"logprobs": None})}
    if not body.get("stream"): return 200, {**base, "choices": [choice("".join(pieces), "stop")], "usage": usage}
    events = [{**base, "choices": [choice(piece, None)]} for piece in pieces] + [{**base, "choices": [choice("", "stop")]}]
    if (body.get("stream_options") or {}).get("include_usage"): events.append({**base, "choices": [], "usage": usage})
    return 200, events


def embeddings(body, bare):
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    vector = [0.5, -0.25, 0.125]
    told = base64.b64encode(struct.pack("<3f", *vector)).decode() if body.get("encoding_format") == "base64" else vector
    data = [{"object": "embedding", "index": at, "embedding": told} for at in range(len(texts))]
    return 200, {"object": "list", "model": MODEL, "data": data, "usage": {"prompt_tokens": len(texts), "total_tokens": len(texts)}}


ROUTES = {"/v1/chat/completions": chat, "/v1/completions": completions, "/v1/embeddings": embeddings}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass

    def tell(self, status, told):
        raw = json.dumps(told, ensure_ascii=False).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(raw)}.items(): self.send_header(name, str(value))
        self.end_headers(); self.wfile.write(raw)

    def do_GET(self):
        if self.path == "/v1/models": return self.tell(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "test"}]})
        self.tell(404, {"detail": "Not Found"})

    def do_POST(self):
        raw, route = self.rfile.read(int(self.headers.get("Content-Length") or 0)), ROUTES.get(self.path)
        if not route: return self.tell(404, {"detail": "Not Found"})
        try:
            body = json.loads(raw)
            if body.get("model") != MODEL: return self.tell(*wrong(404, "no such model", "NotFoundError"))
            if isinstance(body.get("temperature"), str) or (body.get("max_tokens") or 1) < 1: return self.tell(*wrong(400, "a field is wrong"))
            if len(raw) > 60_000: return self.tell(*wrong(400, "This model's maximum context length is 4096 tokens."))
            status, told = route(body, BARE)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error: return self.tell(*wrong(400, f"bad request: {type(error).__name__}"))
        if not isinstance(told, list): return self.tell(status, told)
        self.send_response(200)
        for name, value in {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}.items(): self.send_header(name, value)
        self.end_headers()
        for event in [*(json.dumps(event, ensure_ascii=False) for event in told), "[DONE]"]:
            data = f"data: {event}\n\n".encode(); self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data)); self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--port", type=int, default=8091); ap.add_argument("--bare", action="store_true")
    a = ap.parse_args(); BARE = a.bare
    print("READY", a.port, flush=True); ThreadingHTTPServer(("127.0.0.1", a.port), Handler).serve_forever()
