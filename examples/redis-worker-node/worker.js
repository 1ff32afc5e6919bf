// A ComfyFleet worker with nothing but a Redis client. It follows docs/redis-protocol.md and knows nothing else.
// What is worth copying is how it talks to the fleet; its work is only pretended: replace `work` by your own.

import { createHash, randomUUID } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import { ErrorReply, createClient } from 'redis'

const { REDIS_URL = 'redis://127.0.0.1:6379', PREFIX = '{cf}:', WORKER = `node-${process.pid}` } = process.env
const SLOTS = Number(process.env.SLOTS ?? 1)
const LEASE_S = Number(process.env.LEASE_S ?? 60)
const GRACE_S = Number(process.env.GRACE_S ?? 30)
const WORK_MS = Number(process.env.WORK_MS ?? 1000)
const DECLARED = process.env.DECLARED ?? JSON.stringify({ services: [{ name: 'comfyui' }], slots: SLOTS })

const say = (...words) => console.log(...words)

// Connections: one for calls, one for commands, one for hints. Each comes back by itself.
const options = { url: REDIS_URL, RESP: 2, disableOfflineQueue: true, socket: { reconnectStrategy: (tries) => Math.min(50 * 2 ** tries, 1000) } }
const PASSING = /^(LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN)/

// Until it succeeds, or the server itself says no: a server may go at any moment, the first one included.
async function patiently(act) {
  for (;;) {
    try {
      return await act()
    } catch (error) {
      if (error instanceof ErrorReply && !PASSING.test(error.message)) throw error
      await sleep(100)
    }
  }
}

const connect = () => patiently(async () => {
  const made = createClient(options).on('error', () => {})
  try {
    return await made.connect()
  } catch (error) {
    if (made.isOpen) made.destroy()
    throw error
  }
})

// Calls. A lost answer is asked for again with the same request and number, and so never done twice. A slot carries one
// call at a time; numbers only grow.
const client = randomUUID()
const freeSlots = []
let slotsMade = 0
let number = 0

// A connection may go silent without an end; then nothing tells us but the clock.
const answered = (reply) => Promise.race([reply, sleep(5000, undefined, { ref: false }).then(() => { throw new Error('no answer') })])

async function call(name, ...given) {
  const slot = freeSlots.pop() ?? slotsMade++
  const command = ['FCALL', `cf1_worker_${name}`, '1', `${PREFIX}meta`, `${client}:${slot}`, `${++number}`, '', ...given.map(String)]
  try {
    return await patiently(() => answered(calls.sendCommand(command)))
  } finally {
    freeSlots.push(slot)
  }
}

async function register() {
  // An engine admits us; how soon is up to it.
  while (!(await call('register', WORKER, DECLARED)) && !isDraining) await sleep(200)
  say('registered', WORKER)
}

// One lease, from its first heartbeat to its end.
const running = new Map()

// What is run is what was submitted for this very job, or nothing.
function payloadOf(job, record, sha256) {
  const found = createHash('sha256').update(record).digest('base64')
  const { job_id, ...rest } = JSON.parse(record)
  if (job_id === job && (!sha256 || sha256 === found)) return rest
  throw Object.assign(new Error(`the payload that arrived is not that of job ${job}`), { kind: 'payload_mismatch' })
}

async function run([job, round, leaseNumber, epoch, token, left, record, sha256], askedAt) {
  const lease = [job, round, leaseNumber, epoch, token]
  const stopping = new AbortController()
  let confirmedAt = askedAt
  let seconds = Number(left)
  const obey = (answer) => {
    if (answer === 0) stopping.abort('lost')
    if (answer === 2) stopping.abort('cancelled')
  }
  const beat = async () => {
    const sentAt = performance.now()
    const answer = await call('heartbeat', ...lease, LEASE_S)
    if (answer) [confirmedAt, seconds] = [sentAt, LEASE_S]
    obey(answer)
  }
  // The lease is counted on our own clock: without an answer for most of it, it may be another's by now.
  const watch = setInterval(() => {
    if (performance.now() - confirmedAt > seconds * 800) stopping.abort('lost')
  }, 100)
  const heart = setInterval(() => beat().catch(() => {}), LEASE_S * 250)
  running.set(job, { leaseNumber, stopping })
  say('run', lease.slice(0, 4).join('/'))
  try {
    beat().catch(() => {})
    const report = async (progress) => obey(await call('progress', ...lease, JSON.stringify(progress)))
    const result = await work(payloadOf(job, record, sha256), report, stopping.signal)
    say('completed', job, await call('complete', ...lease, JSON.stringify(result)))
  } catch (error) {
    const why = stopping.signal.reason
    if (why === 'lost') say('lost', job)
    else if (why) say('released', job, await call('release', ...lease, why))
    else say('failed', job, await call('fail', ...lease, JSON.stringify({ kind: error.kind ?? 'unknown', message: error.message })))
  } finally {
    clearInterval(watch)
    clearInterval(heart)
    running.delete(job)
    wake()
  }
}

// The pretended work: some steps, unless the job's metadata asks for a failure of some kind.
async function work({ payload }, report, signal) {
  const { fail } = payload.metadata ?? {}
  if (fail) throw Object.assign(new Error('this job asked to fail'), { kind: fail })
  for (let step = 1; step <= 4; step++) {
    await sleep(WORK_MS / 4, undefined, { signal })
    await report({ value: step, max: 4, percentage: 25 * step })
    signal.throwIfAborted()
  }
  return { outputs: { 9: { text: [`made by ${WORKER}`], made_from: [payload.workflow] } } }
}

// Commands make things fast; a heartbeat would tell of a cancel too, only later.
async function listenForCommands() {
  for (let last = '$'; !isGone; ) {
    try {
      const found = await commands.sendCommand(['XREAD', 'BLOCK', '5000', 'STREAMS', `${PREFIX}commands:${WORKER}`, last])
      for (const [id, flat] of found?.[0]?.[1] ?? []) {
        last = id
        const { action, job_id, lease } = Object.fromEntries(flat.flatMap((field, at) => (at % 2 ? [] : [[field, flat[at + 1]]])))
        const run = running.get(job_id)
        if (action === 'drain') drain()
        else if (run && [0, run.leaseNumber].includes(Number(lease))) {
          if (action === 'cancel') run.stopping.abort('cancelled')
          if (action === 'retry') run.stopping.abort('retry')
          if (action === 'pause') run.stopping.abort('pause')
        }
      }
    } catch {
      await sleep(100)
    }
  }
}

// Polling: on a hint, when a run has ended, and every second at the latest.
let wake = () => {}
let isDraining = false
let isGone = false

async function poll() {
  while (!isDraining) {
    const woken = new Promise((resolve) => { wake = resolve })
    const askedAt = performance.now()
    let leased = null
    if (running.size < SLOTS) {
      try {
        leased = await call('lease_next', WORKER, randomUUID(), randomUUID(), Math.min(10, LEASE_S))
      } catch (error) {
        if (!error.message.startsWith('CFWORKER')) throw error
        await register()
        continue
      }
    }
    if (leased) run(leased, askedAt).catch((error) => say('error', error.message))
    else await Promise.race([woken, sleep(1000)])
  }
}

// The end: what runs may finish within the grace, then it is given back, and at once when asked twice.
function drain() {
  const giveBack = () => running.forEach(({ stopping }) => stopping.abort('drain'))
  if (isDraining) return giveBack()
  isDraining = true
  say('draining')
  wake()
  setTimeout(giveBack, GRACE_S * 1000).unref()
}

process.on('SIGTERM', drain)
process.on('SIGINT', drain)
const [calls, commands, hints] = await Promise.all([connect(), connect(), connect()])
await patiently(() => hints.subscribe(`${PREFIX}channel:hub:events`, () => wake()))
listenForCommands()
await register()
await poll()
while (running.size) await sleep(20)
await call('leave', WORKER)
say('left')
isGone = true
for (const each of [calls, commands, hints]) each.destroy()
