// The witness at a Node.js worker that knows nothing of it: what the worker says is written down as every worker here
// does, at once and with the machine's monotonic clock. Loaded before the worker with `node --import`.

import { openSync, writeSync } from 'node:fs'

const { CHAOS_LOG, CHAOS_WHO, WORKER } = process.env
const log = openSync(CHAOS_LOG, 'a')
const leases = new Map()

function write(what, values) {
  const line = { at: Number(process.hrtime.bigint()) / 1e9, who: CHAOS_WHO, what, ...values }
  writeSync(log, `${JSON.stringify(line)}\n`)
}

const heard = {
  registered: () => write('ready', { role: 'worker' }),
  run(attempt) {
    const [job, round, lease, epoch] = attempt.split('/')
    const of = { job, round: Number(round), lease: Number(lease), epoch: Number(epoch), execution: `made by ${WORKER}` }
    leases.set(job, of)
    write('granted', of)
    write('began', of)
  },
  completed: (job, answer) => settled(job, 'complete', answer),
  released: (job, answer) => settled(job, 'release', answer),
  failed: (job, answer) => settled(job, 'fail', answer),
}

function settled(job, report, answer) {
  write(Number(answer) ? 'accepted' : 'refused', { ...leases.get(job), report })
}

// A process that the machine did not let run is as good as stopped; its log says so, as that of every worker here.
const TICK_S = 0.1
const STALLED_S = 0.5
const now = () => Number(process.hrtime.bigint()) / 1e9
let before = now()
setInterval(() => {
  const at = now()
  if (at - before > TICK_S + STALLED_S) write('stalled', { since: before })
  before = at
}, TICK_S * 1000).unref()

const say = console.log
console.log = (word, ...others) => {
  heard[word]?.(...others)
  say(word, ...others)
}
