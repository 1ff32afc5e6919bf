-- Part 2: encodes and decodes a dispatch. The fields that change with every lease are in a head of fixed form. The rest is a
-- MessagePack map, which is unpacked only when it is needed and packed only when it was changed.
--
-- HEAD: sequence, class number, facts · phase, standing, phase of the record, whether the lease is acknowledged, whether
-- its poll has another lease, whether the log tells of it · round, revision, lease number, attempts, epoch of the lease
-- (0: there is none), lease that was reported as failed · wake_at, cancel_requested_at, ended_at, leased_at, expires_at
-- (below 0: none) · class, relaxed class, worker, poll, token, each after its length in two bytes · record (MessagePack map or
-- empty), the rest, each after its length in four.
--
-- The rest begins with the place of the dispatch and the expected seconds of its lease (run, loads), each of fixed length: an
-- enqueue and a lease set them without unpacking it. A rest that a write packed anew, or an older engine wrote, does not.

local HEAD = '<dIIBBBBBBIIIIIIdddddHc0Hc0Hc0Hc0Hc0Ic0Ic0'
-- The fields of the head that the library sets for a new dispatch.
local PLACE = '<dII'
-- After the three bytes of a long map: the keys and the types of these values. The values have 4, 8 and 8 bytes.
local AT_PLACE, AT_RUN, AT_LOAD = '\165place\206', '\165run_s\203', '\166load_s\203'
local PHASES = {[0] = 'queued', 'leased', 'completed', 'failed', 'cancelled'}
local PHASE_CODES = {queued = 0, leased = 1, completed = 2, failed = 3, cancelled = 4}
local STANDINGS = {[0] = 'in_lane', 'delayed', 'paused'}
local STANDING_CODES = {in_lane = 0, delayed = 1, paused = 2}
local FINAL = {completed = true, failed = true, cancelled = true}
-- The fields of the head that an engine changes. All others are in the rest.
local IN_HEAD = {
  phase = true, standing = true, class_key = true, relaxed_class = true, round = true, wake_at = true, lease = true,
  attempts = true, cancel_requested_at = true,
}

local function job_key(s, job_id)
  return s.p .. 'job:' .. job_id
end

local function job_of(job_id, text)
  local sequence, class_number, facts, phase, standing, record_phase, is_acknowledged, poll_moved, is_noted, round,
    revision, lease_number, attempts, epoch, reported, wake_at, cancel_requested_at, ended_at, leased_at, expires_at,
    class_key, relaxed_class, worker_id, poll_id, token, record, packed_rest = struct.unpack(HEAD, text)
  return {
    job_id = job_id, phase = PHASES[phase], standing = STANDINGS[standing], record_phase = PHASES[record_phase],
    poll_moved = poll_moved == 1, round = round, revision = revision, lease_number = lease_number, attempts = attempts,
    facts = facts, class_number = class_number, reported = reported, sequence = sequence,
    wake_at = wake_at >= 0 and wake_at or nil,
    cancel_requested_at = cancel_requested_at >= 0 and cancel_requested_at or nil,
    ended_at = ended_at >= 0 and ended_at or nil, class_key = class_key,
    relaxed_class = relaxed_class ~= '' and relaxed_class or nil, record = record, packed_rest = packed_rest,
    lease = epoch > 0 and {
      worker_id = worker_id, number = lease_number, epoch = epoch, token = token, poll_id = poll_id,
      leased_at = leased_at, expires_at = expires_at, is_acknowledged = is_acknowledged == 1, is_noted = is_noted == 1,
    } or nil,
  }
end

local NO_LEASE = {epoch = 0, worker_id = '', poll_id = '', token = '', leased_at = -1, expires_at = -1}

local function text_of(job)
  local lease, record, relaxed = job.lease or NO_LEASE, job.record, job.relaxed_class or ''
  return struct.pack(HEAD, job.sequence, job.class_number, job.facts, PHASE_CODES[job.phase],
    STANDING_CODES[job.standing], PHASE_CODES[job.record_phase], lease.is_acknowledged and 1 or 0,
    job.poll_moved and 1 or 0, lease.is_noted and 1 or 0, job.round, job.revision, job.lease_number, job.attempts,
    lease.epoch, job.reported, job.wake_at or -1, job.cancel_requested_at or -1, job.ended_at or -1, lease.leased_at,
    lease.expires_at, #job.class_key, job.class_key, #relaxed, relaxed, #lease.worker_id, lease.worker_id,
    #lease.poll_id, lease.poll_id, #lease.token, lease.token, #record, record, #job.packed_rest, job.packed_rest)
end

-- The fields outside the head: tenant, workflow hash, priority, limits, counters.
local function rest(job)
  if not job.rest then
    job.rest = unpacked(job.packed_rest)
  end
  return job.rest
end

-- Why the worker must stop the job, or nil. A cancel takes precedence. The other requests are rare and in the rest, which is
-- not unpacked for every heartbeat.
local function stop_of(job)
  if job.cancel_requested_at then
    return 'cancel'
  end
  if not job.packed_rest:find('_requested_at', 1, true) then
    return nil
  end
  local values = rest(job)
  return values.pause_requested_at and 'pause' or values.retry_requested_at and 'retry' or nil
end

local function set_rest(job, name, value)
  local values = rest(job)
  values[name] = value
  job.packed_rest = pack(values)
  job.place = nil
end

-- The text that packs the rest, with the seconds that the run and the loads of its lease should take.
local function with_seconds(packed, run_s, load_s)
  if packed:sub(15, 21) == AT_RUN and packed:sub(4, 10) == AT_PLACE and packed:sub(30, 37) == AT_LOAD then
    local run, loads = struct.pack('>d', run_s), struct.pack('>d', load_s)
    if packed:sub(22, 29) == run and packed:sub(38, 45) == loads then
      return packed
    end
    return packed:sub(1, 21) .. run .. AT_LOAD .. loads .. packed:sub(46)
  end
  if run_s == 0 and load_s == 0 and not packed:find('run_s', 1, true) then
    return packed
  end
  local values = unpacked(packed)
  values.run_s, values.load_s = run_s, load_s
  return pack(values)
end

local function load(s, job_id)
  local text = read(s, job_key(s, job_id))
  return text and job_of(job_id, text) or nil
end

local function save(s, job)
  local text = text_of(job)
  put(s, job_key(s, job.job_id), text)
  return text
end

local function stands_in_lane(job)
  return job.phase == 'queued' and job.standing == 'in_lane'
end

-- A lane is "<class number> <place>", and a place "<priority> <length of the hash> <hash><tenant>".
local function lane_of(job)
  if not job.place then
    local values = rest(job)
    local hash = values.workflow_hash
    job.place = whole(values.priority) .. ' ' .. #hash .. ' ' .. hash .. values.tenant
  end
  return whole(job.class_number) .. ' ' .. job.place
end

-- The small parts of the job's record that change, beside its phase.
local function changed_record(record, values, drops)
  local known = record ~= '' and unpacked(record) or {}
  for name, value in pairs(values or {}) do
    known[name] = value
  end
  for _, name in ipairs(drops or {}) do
    known[name] = nil
  end
  -- An empty map would be packed as a list.
  return next(known) and pack(known) or ''
end

-- Facts are lines of the log, numbered by their order. In the lines of a call, \1 stands for the time and \2 for the round.

local function fact_line(kind, data)
  return 'f{"kind":"' .. kind .. '","at":\1,"round":\2' .. (data and ',"data":' .. data or '') .. '}\n'
end

-- → lines, how many
local function told(s, facts, round)
  local lines, count = facts:gsub('\1', now_text(s))
  return (lines:gsub('\2', round)), count
end

-- The text as in a JSON string, without the quotes. Names rarely need escapes.
local function escaped(name)
  return name:find('[^%w%-_.:]') and cjson.encode(name):sub(2, -2) or name
end

-- The line of a new attempt is also the fact that the job was leased. It is written with the next line of the log; until
-- then, readers derive it from the lease.
local function attempt_line(job_id, round, number, epoch, worker_id, leased_at, attempts)
  return 'a{"attempt_id":"' .. escaped(job_id) .. '\\/' .. round .. '\\/' .. number .. '\\/' .. epoch .. '","worker_id":"'
    .. escaped(worker_id) .. '","lease_number":' .. number .. ',"round":' .. round .. ',"started_at":'
    .. exact(leased_at) .. ',"attempt":' .. attempts .. '}\n'
end

local function end_line(s, number, ended)
  return 'e{"lease_number":' .. number .. ',"ended_at":' .. now_text(s) .. ',"end":' .. ended .. '}\n'
end

-- The jobs leased by a worker, by sequence.

local function hold(s, worker_id, sequence)
  local key = s.p .. 'jobs:active:' .. worker_id
  put(s, key, (read(s, key) or '') .. ' ' .. sequence .. ' ')
end

local function let_go(s, worker_id, sequence)
  local key = s.p .. 'jobs:active:' .. worker_id
  local held = read(s, key) or ''
  local from, to = held:find(' ' .. sequence .. ' ', 1, true)
  if not from then
    return
  end
  held = held:sub(1, from - 1) .. held:sub(to + 1)
  if held ~= '' then
    put(s, key, held)
  else
    drop(s, key)
  end
end

local function active_jobs(s, worker_id)
  local jobs = {}
  for sequence in (read(s, s.p .. 'jobs:active:' .. worker_id) or ''):gmatch('%d+') do
    jobs[#jobs + 1] = call('ZRANGEBYSCORE', s.p .. 'jobs', sequence, sequence)[1]
  end
  return jobs
end
