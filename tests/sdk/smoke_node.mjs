// Smoke test of an OpenAI base URL with the official openai SDK for Node; every check has to pass.
//
// usage: node smoke_node.mjs [--base http://127.0.0.1:8180/v1] [--model iop-demo] [--key K] [--timeout S] [--only check,check]
//        (from a folder where `npm install openai` was run)
// One line per check, `ok name` or `FAIL name detail`; exit status 1 if any failed.
// Needs a model that calls tools and thinks when asked to, as iop-demo does. smoke_python.py has the same checks.
import { createRequire } from 'node:module'
import path from 'node:path'
import { pathToFileURL } from 'node:url'
import { parseArgs } from 'node:util'

const text = (value) => ({ type: 'string', default: value })
const { values: args } = parseArgs({
  options: {
    base: text('http://127.0.0.1:8180/v1'),
    model: text('iop-demo'),
    key: text('iop'),
    timeout: text('30'),
    only: { type: 'string' },
  },
})
const installed = createRequire(path.join(process.cwd(), 'x.js')).resolve('openai')
const { default: OpenAI } = await import(pathToFileURL(installed).href)

const client = new OpenAI({ baseURL: args.base, apiKey: args.key, timeout: Number(args.timeout) * 1000, maxRetries: 0 })
const ASK = [{ role: 'user', content: 'Say something about the sea.' }]
const WEATHER = {
  type: 'function',
  function: {
    name: 'get_weather',
    description: 'The weather in a city',
    parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
  },
}
const json = JSON.stringify

function need(ok, detail) {
  if (!ok) throw new Error(detail)
}

function chat(more = {}) {
  const limit = 'max_completion_tokens' in more ? {} : { max_tokens: 256 } // for a model that would not end
  return client.chat.completions.create({ model: args.model, messages: ASK, temperature: 0, ...limit, ...more })
}

async function collect(more) {
  const chunks = []
  for await (const chunk of await chat({ stream: true, ...more })) chunks.push(chunk)
  need(chunks.length, 'no chunks')
  need(new Set(chunks.map((c) => c.id)).size === 1, 'several ids')
  const ends = chunks.map((c) => c.choices[0]?.finish_reason).filter(Boolean)
  need(ends.length === 1, `finish reasons ${json(ends)}`)
  return { chunks, end: ends[0] }
}

const deltas = (chunks) => chunks.filter((c) => c.choices.length).map((c) => c.choices[0].delta)
const joined = (chunks, field = 'content') => deltas(chunks).map((d) => d[field] ?? '').join('')

// The SDK error that `call` ends in: exactly of class `kind`, with an error object of OpenAI's shape.
async function refusal(kind, call) {
  try {
    await call()
  } catch (e) {
    need(e.constructor === kind, `${e.constructor?.name} instead of ${kind.name}: ${e.message}`)
    const shaped = e.error && json(Object.keys(e.error).sort()) === '["code","message","param","type"]'
    need(shaped && (e.error.code === null || typeof e.error.code === 'string'), `error object ${json(e.error)}`)
    return e
  }
  throw new Error(`no error instead of ${kind.name}`)
}

function checkUsage(u) {
  need(u && u.completion_tokens > 0 && u.total_tokens === u.prompt_tokens + u.completion_tokens, `usage ${json(u)}`)
}

function checkCall(name, args, id, end) {
  need(name === 'get_weather' && id, `call ${json(name)}, id ${json(id)}`)
  const value = JSON.parse(args)
  need(value && typeof value === 'object' && !Array.isArray(value), `arguments ${args}`)
  need(end === 'tool_calls', `finish reason ${end}`)
}

const checks = {
  async models_list() {
    const ids = []
    for await (const m of client.models.list()) ids.push(m.id)
    need(ids.includes(args.model), `${args.model} is not among ${json(ids)}`)
  },

  async model_retrieve() {
    const m = await client.models.retrieve(args.model)
    need(m.id === args.model && m.object === 'model', json(m))
  },

  async chat_plain() {
    const r = await chat()
    const choice = r.choices[0]
    need(r.object === 'chat.completion' && r.model === args.model, `${r.object} of ${r.model}`)
    need(choice.message.role === 'assistant' && choice.message.content, json(choice.message))
    need(choice.finish_reason === 'stop', `finish reason ${choice.finish_reason}`)
    checkUsage(r.usage)
  },

  async stream_with_usage() {
    const { chunks, end } = await collect({ stream_options: { include_usage: true } })
    need(joined(chunks) && end === 'stop', `text ${json(joined(chunks))}, finish reason ${end}`)
    const last = chunks.at(-1)
    const withUsage = chunks.filter((c) => c.usage)
    need(withUsage.length === 1 && withUsage[0] === last && last.choices.length === 0, `usage in ${withUsage.length} chunks, last: ${json(last)}`)
    checkUsage(last.usage)
  },

  async stream_without_usage() {
    const { chunks, end } = await collect()
    need(joined(chunks) && end === 'stop', `text ${json(joined(chunks))}, finish reason ${end}`)
    need(!chunks.some((c) => c.usage), 'usage that nobody asked for')
    need(chunks.every((c) => c.choices.length), 'a chunk without choices')
  },

  async tool_call_plain() {
    const choice = (await chat({ tools: [WEATHER], tool_choice: 'required' })).choices[0]
    need(choice.message.tool_calls?.length, `no tool call: ${json(choice)}`)
    const call = choice.message.tool_calls[0]
    checkCall(call.function.name, call.function.arguments, call.id, choice.finish_reason)
  },

  async tool_call_stream() {
    const { chunks, end } = await collect({ tools: [WEATHER], tool_choice: 'required' })
    const parts = deltas(chunks).flatMap((d) => d.tool_calls ?? [])
    need(parts.length, 'no tool call delta')
    need(parts.every((t) => t.index === 0), `indexes ${json(parts.map((t) => t.index))}`)
    const all = (pick) => parts.map((t) => pick(t) ?? '').join('')
    checkCall(all((t) => t.function?.name), all((t) => t.function?.arguments), all((t) => t.id), end)
  },

  async reasoning() {
    const { chunks } = await collect({ reasoning_effort: 'low' })
    const content = joined(chunks, 'reasoning_content')
    const other = joined(chunks, 'reasoning')
    need(content && other, `reasoning_content ${json(content)}, reasoning ${json(other)}`)
    need(content === other, 'reasoning_content and reasoning differ')
    need(joined(chunks), 'no text after the reasoning')
  },

  async unknown_model() {
    const e = await refusal(OpenAI.NotFoundError, () => chat({ model: 'no-such-model' }))
    need(e.code === 'model_not_found' && e.type === 'invalid_request_error' && e.param === 'model', json(e.error))
  },

  async unknown_model_stream() {
    const e = await refusal(OpenAI.NotFoundError, () => collect({ model: 'no-such-model' }))
    need(e.code === 'model_not_found', json(e.error))
  },

  async malformed() {
    for (const body of [
      { model: args.model },
      { model: args.model, messages: [] },
      { model: args.model, messages: 'hello' },
      { model: args.model, messages: ASK, stream: 'yes' },
      { messages: ASK },
    ]) {
      const e = await refusal(OpenAI.BadRequestError, () => client.post('/chat/completions', { body }))
      need(e.type === 'invalid_request_error', `${json(e.error)} for ${Object.keys(body)}`)
    }
  },

  async request_ids() {
    const ids = [(await chat({ max_tokens: 1 }))._request_id, (await chat({ max_tokens: 1 }))._request_id]
    const { data, request_id } = await chat({ max_tokens: 1, stream: true }).withResponse()
    for await (const _ of data);
    ids.push(request_id)
    ids.push((await refusal(OpenAI.NotFoundError, () => chat({ model: 'no-such-model' }))).requestID)
    need(ids.every(Boolean) && new Set(ids).size === ids.length, `request ids ${json(ids)}`)
  },

  async stop_sequence() {
    const full = (await chat()).choices[0].message.content
    const words = full.split(/\s+/).filter(Boolean)
    need(words.length > 3, `too short to stop in: ${json(full)}`)
    const stop = words[Math.floor(words.length / 2)]
    const wanted = full.slice(0, full.indexOf(stop)).trimEnd()
    const choice = (await chat({ stop: [stop] })).choices[0]
    need(choice.message.content.trimEnd() === wanted, `${json(choice.message.content)} instead of ${json(wanted)}`)
    need(choice.finish_reason === 'stop', `finish reason ${choice.finish_reason}`)
    const { chunks, end } = await collect({ stop })
    need(joined(chunks).trimEnd() === wanted, `streamed ${json(joined(chunks))} instead of ${json(wanted)}`)
    need(end === 'stop', `streamed finish reason ${end}`)
  },

  async max_tokens() {
    for (const name of ['max_tokens', 'max_completion_tokens']) {
      const r = await chat({ [name]: 3 })
      need(r.choices[0].finish_reason === 'length', `${name}: finish reason ${r.choices[0].finish_reason}`)
      need(r.usage.completion_tokens <= 3, `${name}: ${r.usage.completion_tokens} tokens`)
      const { end } = await collect({ [name]: 3 })
      need(end === 'length', `${name}: streamed finish reason ${end}`)
    }
  },
}

const only = args.only?.split(',')
for (const name of only ?? []) {
  if (!checks[name]) {
    console.error(`no check ${name}; there are ${Object.keys(checks)}`)
    process.exit(2)
  }
}
let failed = 0
for (const [name, run] of Object.entries(checks)) {
  if (only && !only.includes(name)) continue
  try {
    await run()
    console.log('ok', name)
  } catch (e) {
    failed = 1
    console.log('FAIL', name, `${e?.constructor?.name}: ${e?.message}`.split(/\s+/).join(' ').slice(0, 400))
  }
}
process.exit(failed)
