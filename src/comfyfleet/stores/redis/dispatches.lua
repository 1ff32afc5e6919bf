-- Part 6: dispatches. An engine decides; this part compares, applies and stores. Part 7 has the leases.

local NONE = {}

local function due_at(job)
  local lease, wake = job.lease, job.wake_at
  if not lease then
    return wake
  end
  return wake and math.min(wake, lease.expires_at) or lease.expires_at
end

local function count(s, phase, standing, by)
  local meta = s.meta
  meta[phase] = meta[phase] + by
  if phase == 'queued' then
    meta[standing] = meta[standing] + by
  end
end

-- Counts the payload bytes of open jobs. A job of an older engine has no size.
local function weigh(s, job, by)
  s.meta.payload_bytes = s.meta.payload_bytes + by * (rest(job).payload_bytes or 0)
end

-- Whether a tenant database has yet to settle the end of this job.
local function is_unsettled(job)
  local values = FINAL[job.phase] and rest(job)
  return values and values.is_apart and not values.settled_at
end

-- What `move` needs to know about a job before the change.
local function snapshot(job)
  return {
    phase = job.phase, standing = job.standing, round = job.round, attempts = job.attempts, class_key = job.class_key, relaxed_class = job.relaxed_class,
    lane = stands_in_lane(job) and lane_of(job), due = due_at(job), is_unsettled = is_unsettled(job),
  }
end

local function set_due(s, job, was_due)
  local is_due = due_at(job)
  if is_due then
    if is_due ~= was_due then
      score(s, s.p .. 'jobs:due', job.job_id, is_due)
    end
  elseif was_due then
    score(s, s.p .. 'jobs:due', job.job_id, false)
  end
end

-- Updates all keys that depend on a dispatch. `before` is its snapshot, nil for a new one. `had_jobs`: its tenant had waiting
-- or leased jobs, this one or others, when the step began.
local function move(s, before, after, had_jobs)
  local phase = after.phase
  local was_open, is_open = before and not FINAL[before.phase], not FINAL[phase]
  if before then
    count(s, before.phase, before.standing, -1)
  end
  count(s, phase, after.standing, 1)
  if is_open and not was_open then
    weigh(s, after, 1)
  elseif was_open and not is_open then
    weigh(s, after, -1)
  end
  local is_same_class = was_open and is_open and before.class_key == after.class_key
  local is_same_relaxed = was_open and is_open and before.relaxed_class == after.relaxed_class
  if is_open and not is_same_class then
    pin(s, after.class_key, 1)
  end
  if is_open and after.relaxed_class and not is_same_relaxed then
    pin(s, after.relaxed_class, 1)
  end
  if was_open and not is_same_class then
    pin(s, before.class_key, -1)
  end
  if was_open and before.relaxed_class and not is_same_relaxed then
    pin(s, before.relaxed_class, -1)
  end
  local stood, stands = before and before.lane, stands_in_lane(after)
  if stood and not (stands and lane_of(after) == stood) then
    leave_lane(s, stood, after.job_id)
    stood = false
  end
  if stands and not stood then
    enter_lane(s, lane_of(after), after.job_id, after.sequence, after.class_key, not before, had_jobs)
  end
  if before and not was_open and before.phase ~= phase then
    call('ZREM', s.p .. 'jobs:' .. before.phase, after.job_id)
    if before.phase == 'failed' then
      call('ZREM', s.p .. 'jobs:dead', after.job_id)
    end
    after.ended_at = nil
  end
  local was_unsettled, stays = before and before.is_unsettled, is_unsettled(after)
  if was_unsettled and not stays then
    call('ZREM', s.p .. 'jobs:unsettled', after.job_id)
  end
  if not is_open then
    after.ended_at = now(s)
    -- The order for purging. An unsettled job joins once it is settled, so that it delays no other job.
    if stays then
      call('ZADD', s.p .. 'jobs:unsettled', 0, after.job_id)
    else
      call('ZADD', s.p .. 'jobs:' .. phase, serial(s), after.job_id)
    end
    if phase == 'failed' then
      call('ZADD', s.p .. 'jobs:dead', 0, after.job_id)
    end
  end
  set_due(s, after, before and before.due)
end

local function class_number(s, class)
  s.numbers = s.numbers or {}
  s.numbers[class] = s.numbers[class] or call('HGET', s.p .. 'classes:numbers', class)
  return s.numbers[class]
end

-- Whether all classes of a job are in the table. Sets the number of its class.
local function has_classes(s, job)
  local number = class_number(s, job.class_key)
  if not number or (job.relaxed_class and call('HEXISTS', s.p .. 'classes', job.relaxed_class) == 0) then
    return false
  end
  job.class_number = tonumber(number)
  return true
end

local function ref_at(args, place)
  return {
    job_id = args[place], round = tonumber(args[place + 1]), number = tonumber(args[place + 2]),
    epoch = tonumber(args[place + 3]), token = args[place + 4],
  }
end

local function is_held(job, ref)
  local lease = job.lease
  -- Lua stores equal strings once and compares addresses, so the time of a comparison reveals nothing about a token.
  return lease ~= nil and job.round == ref.round and lease.number == ref.number and lease.epoch == ref.epoch
    and lease.token == ref.token
end

-- *written* is the time of the step, then the dispatch after it.

-- → written, or false
local function write(s, job, w)
  if not job or not (w.ref and is_held(job, w.ref) or w.revision and job.revision == w.revision) then
    return false
  end
  -- Changes the job in memory only; it is stored if the whole write is possible.
  local before, lease = snapshot(job), job.lease
  for name, value in pairs(w.set or NONE) do
    if IN_HEAD[name] then
      job[name] = value
    else
      set_rest(job, name, value)
    end
  end
  for _, name in ipairs(w.drop or NONE) do
    if IN_HEAD[name] then
      job[name] = nil
    else
      set_rest(job, name, nil)
    end
  end
  job.revision = job.revision + 1
  local is_same = not FINAL[before.phase] and before.class_key == job.class_key
    and before.relaxed_class == job.relaxed_class
  -- The class of an open job is pinned, so it is in the table.
  if not FINAL[job.phase] and not is_same and not has_classes(s, job) then
    return false
  end
  local ends = lease and not job.lease
  if ends and not w.ended then
    error({err = 'CFWRITE whoever ends a lease says how its attempt ended'})
  end
  local had_jobs = s.meta.is_fair and is_open(share_of(s, rest(job).tenant))
  local key, log = job_key(s, job.job_id), ''
  if lease and (ends or w.facts) and not lease.is_noted then
    log = attempt_line(job.job_id, before.round, lease.number, lease.epoch, lease.worker_id, lease.leased_at,
      before.attempts)
    lease.is_noted = true
  end
  if ends then
    let_go(s, lease.worker_id, job.sequence)
    if not job.poll_moved then
      drop(s, s.p .. 'poll:' .. lease.poll_id)
    end
    log = log .. end_line(s, lease.number, w.ended)
    if s.meta.is_fair then
      share_end(s, job.job_id, rest(job).tenant, w.ended)
    end
  end
  local record = w.record
  if record and record.phase then
    job.record_phase, record.phase = record.phase, nil
  end
  if record or w.record_drop then
    job.record = changed_record(job.record, record, w.record_drop)
  end
  for name, text in pairs(w.texts or NONE) do
    put(s, key .. ':' .. name, text)
  end
  for _, name in ipairs(w.texts_drop or NONE) do
    drop(s, key .. ':' .. name)
  end
  move(s, before, job, had_jobs)
  for _, block in ipairs(w.blocks or NONE) do
    put_block(s, block)
  end
  for _, pair in ipairs(w.lifted or NONE) do
    lift_block(s, pair[1], pair[2])
  end
  if w.facts then
    local lines, count = told(s, w.facts, job.round)
    job.facts = job.facts + count
    log = log .. lines
  end
  if log ~= '' then
    call('APPEND', key .. ':log', log)
  end
  return struct.pack('<d', now(s)) .. save(s, job)
end

-- false: the write does not change this.
local function write_of(text)
  local parts = unpacked(text)
  local guard = parts[2]
  local w = {
    job_id = parts[1], set = parts[3], drop = parts[4], ended = parts[5], record = parts[6], record_drop = parts[7],
    texts = parts[8], texts_drop = parts[9], facts = parts[10], blocks = parts[11], lifted = parts[12],
  }
  if type(guard) == 'table' then
    w.ref = {round = guard[1], number = guard[2], epoch = guard[3], token = guard[4]}
  else
    w.revision = guard
  end
  return w
end

-- job, dispatch (see jobs.lua) without PLACE, class, place in its lane, payload (JSON), "<tenant>\0<reference>" or "",
-- "1 <bytes of its payload> <offset of its place in the dispatch>" if it is queued in its lane and has no due time, else "0 0" and
-- the offset; number of the arguments that follow, "result" or "failure" and its JSON, then facts in pieces, between which the
-- library puts the time
-- → sequence, time and place, or {the job that has this id or reference}. An engine from before revision 24 sends no offset: its
-- jobs have no place, and it gets none
define_joined('enqueue', function(s, args, at, last)
  local job_id, class, place, reference = args[at], args[at + 2], args[at + 3], args[at + 5]
  local key, meta, number, job = s.p .. 'job:' .. job_id, s.meta, 0, nil
  -- Checked first: Redis does not undo the changes of a call that fails.
  local facts = at + 8 + args[at + 7]
  local is_plain, payload_bytes, place_at = args[at + 6]:match('^(%d) ?(%d*) ?(%d*)$')
  is_plain = is_plain == '1'
  local found = read(s, key)
  if found then
    return {found}
  end
  local text, rank = args[at + 1], nil
  place_at = tonumber(place_at)
  if place_at then
    rank = struct.unpack('>I4', text, place_at + 1) + waiting_from(s, tonumber(place:match('^%-?%d+')))
    text = text:sub(1, place_at) .. struct.pack('>I4', rank) .. text:sub(place_at + 5)
  end
  if is_plain then
    number = class_number(s, class)
    if not number then
      return false
    end
  else
    job = job_of(job_id, struct.pack(PLACE, 0, 0, 0) .. text)
    job.place = place
    if not FINAL[job.phase] and not has_classes(s, job) then
      return false
    end
  end
  local known = reference ~= '' and call('HGET', s.p .. 'references', reference)
  if known then
    return {read(s, job_key(s, known))}
  end
  if reference ~= '' then
    call('HSET', s.p .. 'references', reference, job_id)
  end
  local sequence = meta.sequence + 1
  meta.sequence = sequence
  score(s, s.p .. 'jobs', job_id, sequence)
  local lines, count = table.concat(args, now_text(s), facts, last), last - facts
  if job then
    job.sequence, job.facts = sequence, count
    move(s, nil, job)
    put(s, key, text_of(job))
  else
    meta.queued, meta.in_lane = meta.queued + 1, meta.in_lane + 1
    meta.payload_bytes = meta.payload_bytes + (tonumber(payload_bytes) or 0)
    pin(s, class, 1)
    enter_lane(s, number .. ' ' .. place, job_id, sequence, class, true)
    put(s, key, struct.pack(PLACE, sequence, number, count) .. text)
  end
  put(s, key .. ':payload', args[at + 4])
  put(s, key .. ':log', lines)
  for i = at + 8, facts - 1, 2 do
    put(s, key .. ':' .. args[i], args[i + 1])
  end
  return struct.pack('<dd', sequence, now(s)) .. (rank and struct.pack('<d', rank) or '')
end, function(s, args, names, at)
  names[#names + 1] = s.p .. 'job:' .. args[at]
end)

-- write (MessagePack)
define('write', function(s)
  return write(s, load(s, s.write.job_id), s.write)
end, function(s, args, names)
  s.write = write_of(args[4])
  names[#names + 1] = job_key(s, s.write.job_id)
end)
