-- Part 9: the functions of direct workers, which have only a Redis client, and those that engines call for them.
--
-- A lease is five arguments: job, round, number, epoch, token. Answers to a report: 0 the lease is lost and nothing was
-- changed; 1 done; 2 done, and the worker must stop the job.

local PROGRESS_S = 3600
local PROGRESS_KEPT = 100
local REPORTS_KEPT = 10000
local COMMANDS_S = 3600
local COMMANDS_KEPT = 100
local REFUSED_S = 60
local TOLD_BYTES = 16384

local function wants_ref(s, args, names)
  names[#names + 1] = job_key(s, args[4])
end

local function held(s, args)
  local ref = ref_at(args, 4)
  local job = load(s, ref.job_id)
  if job and is_held(job, ref) then
    return job, ref
  end
  return nil, ref
end

-- The text is stored as received, and others must be able to read it: refuse all but a JSON object.
local function object(text, code, what)
  local is_read, value = pcall(cjson.decode, text)
  if not is_read or type(value) ~= 'table' or not text:find('^%s*{') then
    error({err = code .. ' ' .. what .. ' is not a JSON object'})
  end
  return value
end

-- Checked first: an invalid number (such as NaN) would fail in the middle of the call.
local function seconds(text)
  local number = tonumber(text)
  if not number or not (number >= 0 and number < math.huge) then
    error({err = 'CFCALL ' .. tostring(text) .. ' is no number of seconds'})
  end
  return number
end

-- Engines decode names as UTF-8: other bytes would make a job unreadable.
local UTF_8 = {
  '[\194-\223][\128-\191]', '\224[\160-\191][\128-\191]', '[\225-\236\238\239][\128-\191][\128-\191]',
  '\237[\128-\159][\128-\191]', '\240[\144-\191][\128-\191][\128-\191]',
  '[\241-\243][\128-\191][\128-\191][\128-\191]', '\244[\128-\143][\128-\191][\128-\191]',
}

local function is_text(value)
  for place = 1, value:find('[\128-\255]') and #UTF_8 or 0 do
    -- Replaced by a blank, so that the bytes on both sides do not form a character.
    value = value:gsub(UTF_8[place], ' ')
  end
  return not value:find('[\128-\255]')
end

local function text(value, what)
  if not value or not is_text(value) then
    error({err = 'CFCALL ' .. what .. ' is named in UTF-8'})
  end
  return value
end

-- A repeated report gets the same answer, also without a request id.
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

-- While a client watches, publishes the events of a run to engines, which then need not poll. A user that may not publish there
-- can work all the same. `number` is that of a fact; progress has none. `data` is a JSON object.
local function tell_watchers(s, event, job, lease, at, number, data)
  if call('EXISTS', s.p .. 'watched') == 0 or data and #data > TOLD_BYTES then
    return
  end
  redis.pcall('PUBLISH', s.p .. 'channel:workers:all', string.format(
    '{"event":"%s","job_id":%s,"worker_id":%s,"lease":%d,"round":%d,"timestamp":%s,"number":%d,"data":%s}', event,
    cjson.encode(job.job_id), cjson.encode(lease.worker_id), lease.number, job.round, at, number or 0, data or '{}'))
end

local function settle(s, ref, outcome, set, drop_names, record, texts, texts_drop, kind, data)
  local job = load(s, ref.job_id)
  local lease = job.lease
  local used = lease.is_acknowledged and now(s) - lease.leased_at or 0
  write(s, job, {
    ref = ref, set = set, drop = drop_names, ended = string.format('{"outcome":"%s","used_s":%.17g}', outcome, used),
    record = record, texts = texts, texts_drop = texts_drop, facts = fact_line(kind, data),
  })
  tell_watchers(s, kind, job, lease, now_text(s), job.facts, data)
  return 1
end

local function worker_of(s, worker_id)
  local text = read(s, s.p .. 'worker:' .. worker_id)
  return text and cjson.decode(text) or nil
end

-- Every call of a worker counts as a heartbeat. It has its own key, because others write the record. A removed worker gets
-- none: nothing would delete it.
local function seen(s, worker_id)
  if not read(s, s.p .. 'worker:' .. worker_id) then
    return
  end
  call('SET', s.p .. 'worker:' .. worker_id .. ':heartbeat', exact(now(s)), 'EX', HEARTBEAT_S)
  call('HSET', s.p .. 'workers:seen', worker_id, exact(now(s)))
end

-- worker, its declaration (JSON) → its profile once an engine has admitted this declaration, until then nil
define('worker_register', function(s, args)
  local worker_id, declared = text(args[4], 'a worker'), args[5]
  object(declared, 'CFDECLARED', 'what the worker declares')
  local refused = read(s, s.p .. 'worker:' .. worker_id .. ':refused')
  if refused and refused:sub(1, 40) == redis.sha1hex(declared) then
    error({err = 'CFDECLARED ' .. refused:sub(42)})
  end
  local worker = worker_of(s, worker_id)
  if worker then
    seen(s, worker_id)
  end
  local admitted = call('HGET', s.p .. 'workers:declared', worker_id)
  if worker and not worker.is_offline and admitted == redis.sha1hex(declared) then
    call('HDEL', s.p .. 'workers:waiting', worker_id)
    return worker.profile
  end
  call('HSET', s.p .. 'workers:waiting', worker_id, declared)
  tell_engines(s, 'worker')
  return false
end)

-- worker: deregisters it. Its leases end when they expire.
define('worker_leave', function(s, args)
  call('HSET', s.p .. 'workers:waiting', text(args[4], 'a worker'), '')
  tell_engines(s, 'worker')
  return 1
end)

-- worker, poll, token, seconds until the first heartbeat
-- → job, round, number, epoch, token, seconds left, payload (JSON), SHA-256 of that text (Base64, "" for a job of an older
-- engine); nil if no job waits for it
define('worker_lease_next', function(s, args)
  local worker = worker_of(s, args[4])
  if not worker or worker.is_offline then
    error({err = 'CFWORKER no engine has admitted this worker: register first, and again until it answers a profile'})
  end
  seen(s, args[4])
  local offer, job = s.offer, nil
  offer.profile = worker.profile
  local known = read(s, s.p .. 'poll:' .. offer.poll_id)
  local is_kept_off = worker.quarantined_until and now(s) < worker.quarantined_until
  if known then
    job = load(s, known)
  elseif call('HEXISTS', s.p .. 'workers:waiting', args[4]) == 1 then
    -- Its new declaration may exclude tenants: it gets no job until an engine has admitted it.
    return false
  elseif worker.is_draining or worker.is_paused or is_kept_off then
    return false
  else
    known = lease_next(s, offer)
    if not known then
      return false
    end
    job = load(s, known)
    tell_watchers(s, 'leased', job, job.lease, exact(job.lease.leased_at), job.facts, string.format(
      '{"worker_id":%s,"lease":%d,"attempt":%d}', cjson.encode(args[4]), job.lease.number, job.attempts))
  end
  local lease = job.lease
  local left = string.format('%.3f', lease.expires_at - now(s))
  local payload = call('GET', job_key(s, job.job_id) .. ':payload')
  return {job.job_id, job.round, lease.number, lease.epoch, lease.token, left, payload, rest(job).record_sha256 or ''}
end, function(s, args, names)
  -- Workers choose their own poll ids: two workers with the same id must not get each other's lease.
  local poll_id = args[4] .. '/' .. text(args[5], 'a poll')
  s.offer = {worker_id = args[4], poll_id = poll_id, token = text(args[6], 'a token'), acknowledge_s = seconds(args[7])}
  names[#names + 1] = s.p .. 'worker:' .. args[4]
  wants_worker(s, s.offer, names)
end)

-- Writes the status of a run to its stream.
local function tell_run(s, job_id, worker_id, status, progress, told)
  local stream = s.p .. 'progress:' .. job_id
  local fields = {'progress', progress or '{}', 'worker_id', worker_id, 'timestamp', now_text(s), 'status', status}
  for _, name in ipairs({'percentage', 'message'}) do
    local value = told and told[name]
    if type(value) == 'number' or type(value) == 'string' then
      fields[#fields + 1] = name
      fields[#fields + 1] = tostring(value)
    end
  end
  call('XADD', stream, 'MAXLEN', '~', PROGRESS_KEPT, '*', unpack(fields))
  call('EXPIRE', stream, PROGRESS_S)
end

-- lease, seconds to extend it to. The first heartbeat means that the worker has started the job.
define('worker_heartbeat', function(s, args)
  local job = held(s, args)
  if not job then
    return 0
  end
  local lease, till = job.lease, now(s) + seconds(args[9])
  seen(s, lease.worker_id)
  if not lease.is_acknowledged then
    job.record = changed_record(job.record, {started_at = now(s), worker_id = lease.worker_id})
    tell_run(s, job.job_id, lease.worker_id, 'started')
    tell_watchers(s, 'started', job, lease, now_text(s))
  end
  return extend(s, job, till)
end, wants_ref)

-- lease, progress (JSON)
define('worker_progress', function(s, args)
  local job = held(s, args)
  if not job then
    return 0
  end
  local told, lease = object(args[9], 'CFREPORT', 'the progress'), job.lease
  -- In the form of engines, with worker and time. Of two values with one name the last counts.
  local values = args[9]:match('^%s*{(.*)}%s*$')
  local kept = string.format('{%s%s"at":%s,"worker_id":%s,"lease":%d}', values, values:find('%S') and ',' or '',
    now_text(s), cjson.encode(lease.worker_id), lease.number)
  call('SET', job_key(s, job.job_id) .. ':progress', kept, 'EX', PROGRESS_S)
  tell_run(s, job.job_id, lease.worker_id, 'assigned', args[9], told)
  tell_watchers(s, 'progress', job, lease, now_text(s), nil, args[9])
  return stop_of(job) and 2 or 1
end, wants_ref)

-- lease, result (JSON). An engine updates the statistics later.
define('worker_complete', function(s, args)
  local job, ref = held(s, args)
  if not job then
    return ended_as(s, ref, 'completed')
  end
  object(args[9], 'CFREPORT', 'the result')
  local worker_id, seconds = job.lease.worker_id, now(s) - job.lease.leased_at
  local data = string.format('{"worker_id":%s,"seconds":%.17g}', cjson.encode(worker_id), seconds)
  local finished = s.p .. 'finished'
  call('RPUSH', finished, string.format(
    '{"job_id":%s,"worker_id":%s,"seconds":%.17g}', cjson.encode(ref.job_id), cjson.encode(worker_id), seconds))
  call('LTRIM', finished, -REPORTS_KEPT, -1)
  tell_run(s, ref.job_id, worker_id, 'completed')
  local started_at = not job.lease.is_acknowledged and job.lease.leased_at or nil
  return settle(s, ref, 'completed', {phase = 'completed'}, {'lease', 'wake_at'},
    {phase = 'completed', worker_id = worker_id, completed_at = now(s), started_at = started_at}, {result = args[9]}, {'failure'},
    'completed', data)
end, wants_ref)

local function reason_of(reason)
  return reason and reason ~= '' and '{"reason":' .. cjson.encode(reason) .. '}' or nil
end

-- lease, reason: the job returns to its place, or is cancelled or paused if that was requested
define('worker_release', function(s, args)
  local job, ref = held(s, args)
  if not job then
    return math.max(ended_as(s, ref, 'released'), ended_as(s, ref, 'cancelled'))
  end
  local stop = stop_of(job)
  tell_run(s, ref.job_id, job.lease.worker_id, stop == 'cancel' and 'cancelled' or 'pending')
  if stop == 'cancel' then
    return settle(s, ref, 'cancelled', {phase = 'cancelled'}, {'lease', 'wake_at'},
      {phase = 'cancelled', completed_at = now(s)}, {}, {}, 'cancelled', reason_of(rest(job).cancel_reason))
  elseif stop then
    -- Keep the due time, at which the worker should have confirmed: an engine decides what follows.
    return settle(s, ref, 'cancelled', {phase = 'queued', standing = stop == 'pause' and 'paused' or 'in_lane'},
      {'lease', 'pause_requested_at', 'retry_requested_at'}, {phase = 'queued'}, {}, {},
      stop == 'pause' and 'paused' or 'released',
      stop ~= 'pause' and string.format('{"reason":"retry","attempt":%d}', job.attempts) or nil)
  end
  local reason = args[9] or ''
  if not is_text(reason) then
    reason = reason:gsub('[\128-\255]', '?')
  end
  return settle(s, ref, 'released', {phase = 'queued', releases = (rest(job).releases or 0) + 1}, {'lease'},
    {phase = 'queued'}, {}, {}, 'released', string.format('{"reason":%s,"attempt":%d}', cjson.encode(reason), job.attempts))
end, wants_ref)

-- lease, failure (JSON): stored for an engine, which decides; without an engine the lease expires
define('worker_fail', function(s, args)
  local job, ref = held(s, args)
  if not job then
    -- Of a run that was to be stopped, an engine writes a failure as `cancelled`.
    return math.max(ended_as(s, ref, 'failed'), ended_as(s, ref, 'cancelled'))
  end
  object(args[9], 'CFREPORT', 'the failure')
  if job.reported ~= ref.number then
    job.reported = ref.number
    save(s, job)
    local reports = s.p .. 'reports'
    call('RPUSH', reports, string.format(
      '{"ref":{"job_id":%s,"round":%d,"number":%d,"epoch":%d,"token":%s},"failure":%s}',
      cjson.encode(ref.job_id), ref.round, ref.number, ref.epoch, cjson.encode(ref.token), args[9]))
    call('LTRIM', reports, -REPORTS_KEPT, -1)
    tell_engines(s, 'report')
  end
  return 1
end, wants_ref)

-- functions that engines call for direct workers

-- limit → pending registrations (worker, declaration …), workers and when they were seen, reports, number of finished runs
define_reading('foreign', function(s, args)
  return {
    call('HGETALL', s.p .. 'workers:waiting'), call('HGETALL', s.p .. 'workers:seen'),
    call('LRANGE', s.p .. 'reports', 0, tonumber(args[4]) - 1), call('LLEN', s.p .. 'finished'),
  }
end)

-- worker, the admitted declaration, or "" for a worker that left. A newer declaration stays pending.
define('admitted', function(s, args)
  local worker_id, declared = args[4], args[5]
  if declared == '' then
    call('HDEL', s.p .. 'workers:declared', worker_id)
    call('HDEL', s.p .. 'workers:seen', worker_id)
  else
    call('HSET', s.p .. 'workers:declared', worker_id, redis.sha1hex(declared))
    call('HSET', s.p .. 'workers:seen', worker_id, exact(now(s)))
  end
  if call('HGET', s.p .. 'workers:waiting', worker_id) == declared then
    call('HDEL', s.p .. 'workers:waiting', worker_id)
  end
  return 1
end)

-- worker, the refused declaration, the reason
define('refuse_worker', function(s, args)
  local worker_id, declared = args[4], args[5]
  if call('HGET', s.p .. 'workers:waiting', worker_id) == declared then
    call('HDEL', s.p .. 'workers:waiting', worker_id)
    call('SET', s.p .. 'worker:' .. worker_id .. ':refused', redis.sha1hex(declared) .. ' ' .. args[6], 'EX', REFUSED_S)
  end
  return 1
end)

-- a report as it was read, after it was handled
define('settle_report', function(s, args)
  return call('LREM', s.p .. 'reports', 1, args[4])
end)

-- limit → completed runs, each once
define('take_finished', function(s, args)
  return call('LPOP', s.p .. 'finished', tonumber(args[4]))
end)

-- worker or "*" for all, action, job or "", lease number, reason, sender
define('tell', function(s, args)
  local workers = args[4] == '*' and call('ZRANGE', s.p .. 'workers:active', 0, -1) or {args[4]}
  local told = cjson.encode({
    worker_id = args[4], action = args[5], job_id = args[6], lease = tonumber(args[7]), reason = args[8], from = args[9],
    timestamp = now(s),
  })
  for _, worker_id in ipairs(workers) do
    local stream = s.p .. 'commands:' .. worker_id
    call('XADD', stream, 'MAXLEN', '~', COMMANDS_KEPT, '*', 'action', args[5], 'job_id', args[6], 'lease', args[7],
      'reason', args[8], 'timestamp', now_text(s))
    call('EXPIRE', stream, COMMANDS_S)
    call('PUBLISH', s.p .. 'channel:worker:' .. worker_id, told)
  end
  call('PUBLISH', s.p .. 'channel:workers:all', told)
  return 1
end)
