-- Part 6: the functions of a worker that has a Redis client and nothing else. Plain arguments, plain answers.
--
-- A lease is shown as five arguments: job, round, number, epoch, token. Answers to a report: 0 the lease is lost and
-- nothing was changed, 1 done, 2 done, and the job is to be stopped.

local PROGRESS_S = 3600
local PROGRESS_KEPT = 100
local REPORTS_KEPT = 10000

local function ref_at(args, place)
  return {
    job_id = args[place], round = tonumber(args[place + 1]), number = tonumber(args[place + 2]),
    epoch = tonumber(args[place + 3]), token = args[place + 4],
  }
end

local function wants_ref(s, args, names)
  wants_job(s, args[4], names)
end

local function held(s, args)
  local ref = ref_at(args, 4)
  local job = load(s, ref.job_id)
  if job and is_held(job, ref) then
    return job, ref
  end
  return nil, ref
end

-- The same report twice gets the same answer, request id or not.
local function ended_as(s, ref, outcome)
  local log = read(s, job_key(s, ref.job_id) .. ':log')
  local attempt = string.format('%s/%d/%d/%d', ref.job_id, ref.round, ref.number, ref.epoch)
  local begun = string.format('a{"attempt_id":%s,', cjson.encode(attempt))
  if not log or not log:find(begun, 1, true) then
    return 0
  end
  local line = log:match('e{"lease_number":' .. whole(ref.number) .. ',[^\n]*')
  return line and line:find('"outcome":"' .. outcome .. '"', 1, true) and 1 or 0
end

local function settle(s, ref, outcome, set, drop_names, record, texts, texts_drop, facts)
  write(s, load(s, ref.job_id), {
    ref = ref, set = set, drop = drop_names, ended = '{"outcome":"' .. outcome .. '"}', record = record, texts = texts,
    texts_drop = texts_drop, facts = facts,
  })
  return 1
end

local function worker_of(s, worker_id)
  local text = read(s, s.p .. 'worker:' .. worker_id)
  return text and cjson.decode(text) or nil
end

-- worker, what it declares (JSON) → its profile once an engine has admitted it, else nothing yet
define('worker_register', function(s, args)
  local worker = worker_of(s, args[4])
  if worker then
    call('SET', s.p .. 'worker:' .. args[4] .. ':heartbeat', exact(now(s)), 'EX', HEARTBEAT_S)
    call('HDEL', s.p .. 'workers:waiting', args[4])
    return worker.profile
  end
  call('HSET', s.p .. 'workers:waiting', args[4], args[5])
  call('PUBLISH', s.p .. 'channel:hub:events', 'worker')
  return false
end)

-- worker, poll, token, seconds within which the first heartbeat must come
-- → job, round, number, epoch, token, seconds left, payload (JSON); nothing if nothing waits for it
define('worker_lease_next', function(s, args)
  local worker = worker_of(s, args[4])
  if not worker then
    error({err = 'CFWORKER no engine has admitted this worker: register first, and again until it answers a profile'})
  end
  local offer, job = s.offer, nil
  offer.profile = worker.profile
  local known = read(s, s.p .. 'poll:' .. offer.poll_id)
  if known then
    job = load(s, known)
  elseif worker.is_draining or worker.is_paused or worker.is_offline then
    return false
  else
    local leased = lease_next(s, offer)
    if not leased then
      return false
    end
    job = unpacked(leased[1])
  end
  local lease = job.lease
  local left = string.format('%.3f', lease.expires_at - now(s))
  local payload = call('GET', job_key(s, job.job_id) .. ':payload')
  return {job.job_id, job.round, lease.number, lease.epoch, lease.token, left, payload}
end, function(s, args, names)
  s.offer = {worker_id = args[4], poll_id = args[5], token = args[6], acknowledge_s = tonumber(args[7])}
  names[#names + 1] = s.p .. 'worker:' .. args[4]
  wants_worker(s, s.offer, names)
end)

-- lease, seconds to extend it to
define('worker_heartbeat', function(s, args)
  local job = held(s, args)
  if not job then
    return 0
  end
  call('SET', s.p .. 'worker:' .. job.lease.worker_id .. ':heartbeat', exact(now(s)), 'EX', HEARTBEAT_S)
  return extend(s, job, now(s) + tonumber(args[9]))
end, wants_ref)

-- lease, progress (JSON)
define('worker_progress', function(s, args)
  local job = held(s, args)
  if not job then
    return 0
  end
  local stream = s.p .. 'progress:' .. job.job_id
  call('SET', job_key(s, job.job_id) .. ':progress', args[9], 'EX', PROGRESS_S)
  call('XADD', stream, 'MAXLEN', '~', PROGRESS_KEPT, '*', 'progress', args[9])
  call('EXPIRE', stream, PROGRESS_S)
  return job.cancel_requested_at and 2 or 1
end, wants_ref)

-- lease, result (JSON)
define('worker_complete', function(s, args)
  local job, ref = held(s, args)
  if not job then
    return ended_as(s, ref, 'completed')
  end
  local worker_id = job.lease.worker_id
  local data = string.format('{"worker_id":%s,"seconds":%.17g}', cjson.encode(worker_id), now(s) - job.lease.leased_at)
  return settle(s, ref, 'completed', {phase = 'completed'}, {'lease', 'wake_at'},
    {phase = 'completed', worker_id = worker_id, completed_at = now(s)}, {result = args[9]}, {'failure'},
    {{'completed', data}})
end, wants_ref)

-- lease, reason: back to its place, or cancelled if that was asked for
define('worker_release', function(s, args)
  local job, ref = held(s, args)
  if not job then
    return math.max(ended_as(s, ref, 'released'), ended_as(s, ref, 'cancelled'))
  end
  if job.cancel_requested_at then
    return settle(s, ref, 'cancelled', {phase = 'cancelled'}, {'lease', 'wake_at'},
      {phase = 'cancelled', completed_at = now(s)}, {}, {}, {{'cancelled', ''}})
  end
  return settle(s, ref, 'released', {phase = 'queued', releases = (job.releases or 0) + 1}, {'lease'},
    {phase = 'queued'}, {}, {}, {{'released', '{"reason":' .. cjson.encode(args[9]) .. '}'}})
end, wants_ref)

-- lease, failure (JSON): kept for an engine, whose verdict it is; if none comes, the lease runs out
define('worker_fail', function(s, args)
  local job, ref = held(s, args)
  if not job then
    return ended_as(s, ref, 'failed')
  end
  if job.reported ~= ref.number then
    job.reported = ref.number
    save(s, job)
    local reports = s.p .. 'reports'
    call('RPUSH', reports, string.format(
      '{"ref":{"job_id":%s,"round":%d,"number":%d,"epoch":%d,"token":%s},"failure":%s}',
      cjson.encode(ref.job_id), ref.round, ref.number, ref.epoch, cjson.encode(ref.token), args[9]))
    call('LTRIM', reports, -REPORTS_KEPT, -1)
    call('PUBLISH', s.p .. 'channel:hub:events', 'report')
  end
  return 1
end, wants_ref)
