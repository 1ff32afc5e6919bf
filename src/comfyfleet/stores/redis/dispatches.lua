-- Part 4: dispatches and the leases on them. Values come from an engine; here they are compared, applied and kept.

local NONE = {}
local FINAL = {completed = true, failed = true, cancelled = true}

local function job_key(s, job_id)
  return s.p .. 'job:' .. job_id
end

local function wants_job(s, job_id, names)
  names[#names + 1] = job_key(s, job_id)
  names[#names + 1] = job_key(s, job_id) .. ':log'
end

local function wants_worker(s, offer, names)
  names[#names + 1] = s.p .. 'jobs:active:' .. offer.worker_id
  names[#names + 1] = s.p .. 'blocks:' .. offer.worker_id
  names[#names + 1] = s.p .. 'poll:' .. offer.poll_id
end

local function load(s, job_id)
  local text = read(s, job_key(s, job_id))
  return text and unpacked(text) or nil
end

local function save(s, job)
  local text = pack(job)
  put(s, job_key(s, job.job_id), text)
  return text
end

local function note(s, job_id, lines)
  if #lines > 0 then
    local key = job_key(s, job_id) .. ':log'
    put(s, key, (read(s, key) or '') .. table.concat(lines))
  end
end

-- facts: {kind, data as JSON or ""} each. They are numbered here, in the step that makes them true.
local function add_facts(s, job, facts, lines)
  local before = job.facts
  for place, fact in ipairs(facts) do
    local data = fact[2] ~= '' and ',"data":' .. fact[2] or ''
    lines[#lines + 1] = string.format('f{"number":%d,"kind":"%s","at":%.17g,"round":%d%s}\n',
      before + place, fact[1], now(s), job.round, data)
  end
  job.facts = before + #facts
  return before
end

local function due_at(job)
  local lease, wake = job.lease, job.wake_at
  if not lease then
    return wake
  end
  return wake and math.min(wake, lease.expires_at) or lease.expires_at
end

local function stands_in_lane(job)
  return job.phase == 'queued' and job.standing == 'in_lane'
end

local function pin(s, class, by)
  local pins = call('HINCRBY', s.p .. 'classes:pins', class, by)
  if pins == 0 then
    call('HDEL', s.p .. 'classes:pins', class)
    call('ZADD', s.p .. 'classes:idle', serial(s), class)
  elseif pins == 1 and by == 1 then
    call('ZREM', s.p .. 'classes:idle', class)
  end
end

local function count(s, job, by)
  local meta = s.meta
  meta[job.phase] = meta[job.phase] + by
  if job.phase == 'queued' then
    meta[job.standing] = meta[job.standing] + by
  end
end

-- What `move` must know of a job before it is changed.
local function snapshot(job)
  return {
    job_id = job.job_id, phase = job.phase, standing = job.standing, class_key = job.class_key,
    relaxed_class = job.relaxed_class, class_number = job.class_number, priority = job.priority,
    workflow_hash = job.workflow_hash, tenant = job.tenant, due = due_at(job),
  }
end

-- Keeps everything that follows from a dispatch in step. `before` is its snapshot, nil for a new one.
local function move(s, before, after, has_followers)
  if before then
    count(s, before, -1)
  end
  count(s, after, 1)
  local was_open, is_open = before and not FINAL[before.phase], not FINAL[after.phase]
  if is_open and not (was_open and before.class_key == after.class_key) then
    pin(s, after.class_key, 1)
  end
  if is_open and after.relaxed_class and not (was_open and before.relaxed_class == after.relaxed_class) then
    pin(s, after.relaxed_class, 1)
  end
  if was_open and not (is_open and before.class_key == after.class_key) then
    pin(s, before.class_key, -1)
  end
  if was_open and before.relaxed_class and not (is_open and before.relaxed_class == after.relaxed_class) then
    pin(s, before.relaxed_class, -1)
  end
  local stood, stands = before and stands_in_lane(before), stands_in_lane(after)
  if stood and not (stands and lane_of(after) == lane_of(before)) then
    leave_lane(s, before, has_followers)
    stood = false
  end
  if stands and not stood then
    enter_lane(s, after)
  end
  if before and FINAL[before.phase] and before.phase ~= after.phase then
    call('ZREM', s.p .. 'jobs:' .. before.phase, before.job_id)
    if before.phase == 'failed' then
      call('ZREM', s.p .. 'jobs:dead', before.job_id)
    end
    after.ended_at = nil
  end
  if not is_open then
    after.ended_at = now(s)
    call('ZADD', s.p .. 'jobs:' .. after.phase, serial(s), after.job_id)
    if after.phase == 'failed' then
      call('ZADD', s.p .. 'jobs:dead', 0, after.job_id)
    end
  end
  local was_due, is_due = before and before.due, due_at(after)
  if is_due then
    if is_due ~= was_due then
      call('ZADD', s.p .. 'jobs:due', is_due, after.job_id)
    end
  elseif was_due then
    call('ZREM', s.p .. 'jobs:due', after.job_id)
  end
end

-- The numbers of a job's classes, if all of them are in the table.
local function has_classes(s, job)
  local number = call('HGET', s.p .. 'classes:numbers', job.class_key)
  if not number or (job.relaxed_class and call('HEXISTS', s.p .. 'classes', job.relaxed_class) == 0) then
    return false
  end
  job.class_number = tonumber(number)
  return true
end

local function active_jobs(s, worker_id)
  local text = read(s, s.p .. 'jobs:active:' .. worker_id)
  return text and unpacked(text) or {}
end

local function set_active(s, worker_id, jobs)
  local key = s.p .. 'jobs:active:' .. worker_id
  if #jobs > 0 then
    put(s, key, pack(jobs))
  else
    drop(s, key)
  end
end

local function is_held(job, ref)
  local lease = job.lease
  -- Digests, so that the time a comparison takes says nothing about a token.
  return lease ~= nil and job.round == ref.round and lease.number == ref.number and lease.epoch == ref.epoch
    and redis.sha1hex(lease.token) == redis.sha1hex(ref.token)
end

local function written(s, job, text, before)
  return {text, before, exact(now(s))}
end

local function grant(s, after, offer, has_followers)
  local at, before = now(s), snapshot(after)
  after.phase = 'leased'
  after.lease_number = after.lease_number + 1
  after.attempts = after.attempts + 1
  after.revision = after.revision + 1
  after.record.phase = 'leased'
  after.poll_moved = nil
  after.lease = {
    worker_id = offer.worker_id, number = after.lease_number, epoch = s.meta.epoch, token = offer.token,
    poll_id = offer.poll_id, leased_at = at, expires_at = at + offer.acknowledge_s, is_acknowledged = false,
  }
  move(s, before, after, has_followers)
  local mine = active_jobs(s, offer.worker_id)
  mine[#mine + 1] = after.job_id
  set_active(s, offer.worker_id, mine)
  local poll = s.p .. 'poll:' .. offer.poll_id
  local earlier = read(s, poll)
  if earlier and earlier ~= after.job_id then
    -- One poll, two leases: the newer one owns it, and the end of the older must leave it alone.
    local other = load(s, earlier)
    if other then
      other.poll_moved = true
      save(s, other)
    end
  end
  put(s, poll, after.job_id)
  local worker = cjson.encode(offer.worker_id)
  local lines = {string.format(
    'a{"attempt_id":%s,"worker_id":%s,"lease_number":%d,"round":%d,"started_at":%.17g}\n',
    cjson.encode(string.format('%s/%d/%d/%d', after.job_id, after.round, after.lease_number, s.meta.epoch)),
    worker, after.lease_number, after.round, at)}
  local data = string.format('{"worker_id":%s,"lease":%d,"attempt":%d}', worker, after.lease_number, after.attempts)
  local numbered = add_facts(s, after, {{'leased', data}}, lines)
  note(s, after.job_id, lines)
  return written(s, after, save(s, after), numbered)
end

local function lease_next(s, offer)
  if s.meta.is_paused then
    return false
  end
  local blocked = blocked_targets(s, offer.worker_id)
  local chosen = first(s, offer.profile, blocked)
  if not chosen then
    local put_bounds_right
    chosen, put_bounds_right = walk(s, offer.profile, blocked, 1, function()
      return true
    end)
    put_bounds_right(true)
    if not chosen then
      return false
    end
  end
  local names = {}
  wants_job(s, chosen.job_id, names)
  preload(s, names)
  return grant(s, load(s, chosen.job_id), offer, chosen.has_followers)
end

local function end_lease(s, job, lease, ended, lines)
  local mine = {}
  for _, job_id in ipairs(active_jobs(s, lease.worker_id)) do
    if job_id ~= job.job_id then
      mine[#mine + 1] = job_id
    end
  end
  set_active(s, lease.worker_id, mine)
  if not job.poll_moved then
    drop(s, s.p .. 'poll:' .. lease.poll_id)
  end
  lines[#lines + 1] = string.format('e{"lease_number":%d,"ended_at":%.17g,"end":%s}\n', job.lease_number, now(s), ended)
end

local function extend(s, job, till)
  local was_due = due_at(job)
  -- A heartbeat never shortens a lease: two of them can arrive in the wrong order.
  job.lease.expires_at = math.max(job.lease.expires_at, till)
  job.lease.is_acknowledged = true
  job.revision = job.revision + 1
  if due_at(job) ~= was_due then
    call('ZADD', s.p .. 'jobs:due', due_at(job), job.job_id)
  end
  save(s, job)
  return job.cancel_requested_at and 2 or 1
end

local function write(s, job, w)
  if not job or not (w.ref and is_held(job, w.ref) or w.revision and job.revision == w.revision) then
    return false
  end
  -- The job is changed in this call's own memory; nothing is kept of it unless all of the write can be.
  local before, lease = snapshot(job), job.lease
  for name, value in pairs(w.set or NONE) do
    job[name] = value
  end
  for _, name in ipairs(w.drop or NONE) do
    job[name] = nil
  end
  job.revision = job.revision + 1
  local is_same = not FINAL[before.phase] and before.class_key == job.class_key
    and before.relaxed_class == job.relaxed_class
  -- The class of an open job is pinned: it is there.
  if not FINAL[job.phase] and not is_same and not has_classes(s, job) then
    return false
  end
  local ends = lease and not job.lease
  if ends and not w.ended then
    error({err = 'CFWRITE whoever ends a lease says how its attempt ended'})
  end
  local key, lines = job_key(s, job.job_id), {}
  if ends then
    end_lease(s, job, lease, w.ended, lines)
  end
  for name, value in pairs(w.record or NONE) do
    job.record[name] = value
  end
  for _, name in ipairs(w.record_drop or NONE) do
    job.record[name] = nil
  end
  for name, text in pairs(w.texts or NONE) do
    put(s, key .. ':' .. name, text)
  end
  for _, name in ipairs(w.texts_drop or NONE) do
    drop(s, key .. ':' .. name)
  end
  move(s, before, job)
  for _, block in ipairs(w.blocks or NONE) do
    put_block(s, block)
  end
  for _, pair in ipairs(w.lifted or NONE) do
    lift_block(s, pair[1], pair[2])
  end
  local numbered = add_facts(s, job, w.facts or NONE, lines)
  note(s, job.job_id, lines)
  return written(s, job, save(s, job), numbered)
end

-- dispatch (MessagePack), payload (JSON), reference or "", facts (MessagePack), then "result" or "failure" and its JSON
define('enqueue', function(s, args)
  local job = unpacked(args[4])
  if not FINAL[job.phase] and not has_classes(s, job) then
    return false
  end
  local key = job_key(s, job.job_id)
  if args[6] ~= '' then
    local reference = job.tenant .. '\0' .. args[6]
    local known = call('HGET', s.p .. 'references', reference)
    if known then
      return {call('GET', job_key(s, known)), -1, exact(now(s))}
    end
  end
  if read(s, key) then
    error({err = 'CFENQUEUE there is a job of this id: ids are made by the engine and never repeat'})
  end
  if args[6] ~= '' then
    call('HSET', s.p .. 'references', job.tenant .. '\0' .. args[6], job.job_id)
    job.reference = args[6]
  end
  s.meta.sequence = s.meta.sequence + 1
  job.sequence = s.meta.sequence
  call('ZADD', s.p .. 'jobs', job.sequence, job.job_id)
  put(s, key .. ':payload', args[5])
  for i = 8, #args, 2 do
    put(s, key .. ':' .. args[i], args[i + 1])
  end
  move(s, nil, job)
  local lines = {}
  local before = add_facts(s, job, unpacked(args[7]), lines)
  put(s, key .. ':log', table.concat(lines))
  return written(s, job, save(s, job), before)
end)

-- job id, offer (MessagePack)
define('lease', function(s, args)
  local job, offer = load(s, args[4]), s.offer
  if not job or not stands_in_lane(job) or s.meta.is_paused then
    return false
  end
  if call('SISMEMBER', s.p .. 'profile:' .. offer.profile .. ':classes', job.class_key) == 0 then
    return false
  end
  local blocked = blocked_targets(s, offer.worker_id)
  if blocked[job.workflow_hash] or blocked[job.job_id] then
    return false
  end
  return grant(s, job, offer)
end, function(s, args, names)
  s.offer = unpacked(args[5])
  wants_job(s, args[4], names)
  wants_worker(s, s.offer, names)
end)

-- offer (MessagePack)
define('lease_next', function(s)
  return lease_next(s, s.offer)
end, function(s, args, names)
  s.offer = unpacked(args[4])
  wants_worker(s, s.offer, names)
end)

-- write (MessagePack)
define('write', function(s)
  return write(s, load(s, s.write.job_id), s.write)
end, function(s, args, names)
  s.write = unpacked(args[4])
  wants_job(s, s.write.job_id, names)
end)

-- write, offer (MessagePack)
define('finish_and_lease_next', function(s)
  local finished = write(s, load(s, s.write.job_id), s.write)
  if not finished then
    return false
  end
  return {finished, lease_next(s, s.offer)}
end, function(s, args, names)
  s.write, s.offer = unpacked(args[4]), unpacked(args[5])
  wants_job(s, s.write.job_id, names)
  wants_worker(s, s.offer, names)
end)

-- profile, worker, slots, lanes, quantum, then workflow hashes to leave out
define('peek', function(s, args)
  if s.meta.is_paused then
    return {}
  end
  local skipped = blocked_targets(s, args[5])
  for i = 9, #args do
    skipped[args[i]] = true
  end
  local slots, lanes, quantum = tonumber(args[6]), tonumber(args[7]), tonumber(args[8])
  local found, seen, seen_count, level, least = {}, {}, 0, nil, 0
  local _, put_bounds_right = walk(s, args[4], skipped, slots, function(item)
    if #found >= slots then
      if item.level ~= level or seen_count >= lanes or item.time > least + quantum then
        return true
      end
      if seen[item.lane] then
        return false
      end
    end
    if #found == 0 or item.level ~= level then
      level, least, seen, seen_count = item.level, item.time, {}, 0
    end
    if not seen[item.lane] then
      seen[item.lane] = true
      seen_count = seen_count + 1
    end
    found[#found + 1] = item
    return false
  end)
  put_bounds_right(false)
  local answer = {}
  for place, item in ipairs(found) do
    answer[place] = {read(s, job_key(s, item.job_id)), exact(item.time)}
  end
  return answer
end)

-- ttl, then leases (MessagePack map each) → for each 0 lost, 1 alive, 2 alive and to be cancelled
define('heartbeat', function(s, args)
  local till, answer, workers = now(s) + tonumber(args[4]), {}, {}
  for place, ref in ipairs(s.refs) do
    local job = load(s, ref.job_id)
    answer[place] = 0
    if job and is_held(job, ref) then
      answer[place] = extend(s, job, till)
      workers[job.lease.worker_id] = true
    end
  end
  for worker_id in pairs(workers) do
    call('SET', s.p .. 'worker:' .. worker_id .. ':heartbeat', exact(now(s)), 'EX', HEARTBEAT_S)
  end
  return answer
end, function(s, args, names)
  s.refs = {}
  for place = 5, #args do
    s.refs[place - 4] = unpacked(args[place])
    names[#names + 1] = job_key(s, s.refs[place - 4].job_id)
  end
end)
