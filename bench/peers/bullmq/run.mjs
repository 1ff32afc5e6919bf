// BullMQ as its guide describes it: jobs in bulk, one worker with a concurrency of so many. The default options, so every
// change of a job is told on its stream of events and a finished job is kept. Neither removeOnComplete nor the automatic
// pipelining of ioredis made it measurably faster.
//
//     node run.mjs throughput|latency <url> <jobs> <slots>
//
// Prints one line of JSON.

import { Queue, Worker } from "bullmq";
import IORedis from "ioredis";
import { setTimeout as sleep } from "node:timers/promises";

const [mode, url, jobsText, slotsText] = process.argv.slice(2);
const jobs = Number(jobsText);
const warmUps = mode === "latency" ? 5 : 0;
const text = "x".repeat(256);
const connect = () => new IORedis(url, { maxRetriesPerRequest: null });
const now = () => performance.timeOrigin + performance.now();

const queue = new Queue("bench", { connection: connect() });
await queue.waitUntilReady();

const answer = { latencies_ms: [] };
let started = 0;
let finished = 0;
let allDone;
const done = new Promise((resolve) => (allDone = resolve));
const handle = async (job) => {
  const at = now();
  started ||= at;
  answer.latencies_ms.push(at - job.data.sent);
};

async function fill() {
  const began = now();
  for (let first = 0; first < jobs; first += 1000) {
    const count = Math.min(1000, jobs - first);
    await queue.addBulk(Array.from({ length: count }, () => ({ name: "job", data: { text, sent: now() } })));
  }
  answer.enqueue_s = (now() - began) / 1000;
}

if (mode === "throughput") await fill();
const worker = new Worker("bench", handle, {
  connection: connect(),
  concurrency: Number(slotsText),
});
worker.on("completed", () => {
  finished += 1;
  if (finished === jobs + warmUps) allDone();
});
await worker.waitUntilReady();
if (mode === "latency") {
  await sleep(200);
  for (let number = 0; number < jobs + warmUps; number += 1) {
    await queue.add("job", { text, sent: now() });
    await sleep(20 + 20 * Math.random());
  }
}
await done;
answer.process_s = (now() - started) / 1000;
answer.latencies_ms = mode === "latency" ? answer.latencies_ms.slice(warmUps) : [];
console.log(JSON.stringify(answer));
await worker.close();
await queue.close();
process.exit(0);
