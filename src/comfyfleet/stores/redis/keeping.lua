-- Part 8: the table profile × class, workers, workflow statistics, and all reading functions.

local function is_at(s, version)
  if tonumber(version) ~= s.meta.version then
    return false
  end
  s.meta.version = s.meta.version + 1
  return true
end

local function drop_class(s, class)
  local profiles = s.p .. 'class:' .. class .. ':profiles'
  for _, profile in ipairs(call('SMEMBERS', profiles)) do
    call('SREM', s.p .. 'profile:' .. profile .. ':classes', class)
  end
  call('DEL', profiles)
  call('HDEL', s.p .. 'classes', class)
  call('HDEL', s.p .. 'classes:numbers', class)
end

-- version, class, its JSON, maximum of idle classes, then the profiles that may take it
define('put_class', function(s, args)
  if not is_at(s, args[4]) then
    return false
  end
  local class, idle = args[5], s.p .. 'classes:idle'
  if call('HSET', s.p .. 'classes', class, args[6]) == 1 then
    s.meta.classes = s.meta.classes + 1
    call('HSET', s.p .. 'classes:numbers', class, whole(s.meta.classes))
    for i = 8, #args do
      if call('SISMEMBER', s.p .. 'profiles', args[i]) == 1 then
        call('SADD', s.p .. 'class:' .. class .. ':profiles', args[i])
        call('SADD', s.p .. 'profile:' .. args[i] .. ':classes', class)
      end
    end
    call('ZADD', idle, serial(s), class)
    while call('ZCARD', idle) > tonumber(args[7]) do
      drop_class(s, call('ZPOPMIN', idle)[1])
    end
    tell_engines(s, 'table ' .. client_of(s))
  end
  return 1
end)

-- version, profile, then the classes it may take
define('put_profile', function(s, args)
  local profile, numbers = args[5], {}
  for i = 6, #args do
    local number = call('HGET', s.p .. 'classes:numbers', args[i])
    if not number then
      return false
    end
    numbers[number] = true
  end
  if not is_at(s, args[4]) then
    return false
  end
  if call('SADD', s.p .. 'profiles', profile) == 1 then
    for i = 6, #args do
      call('SADD', s.p .. 'profile:' .. profile .. ':classes', args[i])
      call('SADD', s.p .. 'class:' .. args[i] .. ':profiles', profile)
    end
    for _, lane in ipairs(call('ZRANGE', s.p .. 'jobs:pending', 0, -1)) do
      if numbers[parts_of(lane)] then
        call('ZADD', s.p .. 'index:' .. profile, '-inf', lane)
      end
    end
  end
  return 1
end)

-- profiles
define('drop_profiles', function(s, args)
  for i = 4, #args do
    local profile = args[i]
    if call('SREM', s.p .. 'profiles', profile) == 1 then
      local classes, index = s.p .. 'profile:' .. profile .. ':classes', s.p .. 'index:' .. profile
      for _, class in ipairs(call('SMEMBERS', classes)) do
        call('SREM', s.p .. 'class:' .. class .. ':profiles', profile)
      end
      local entries = call('ZRANGEBYSCORE', index, '(-inf', '+inf', 'WITHSCORES')
      for place = 1, #entries, 2 do
        -- Read the level from the entry: the score of an excluded tenant is inf.
        local _, _, level = struct.unpack('>ddd', entries[place])
        call('DEL', group_of(s, profile, whole(-level), entries[place]:sub(25)))
      end
      call('DEL', classes, index)
      end_search(s, {profile})
    end
  end
  return 1
end)

define_reading('table', function(s)
  return {s.meta.version, call('HGETALL', s.p .. 'classes'), call('SMEMBERS', s.p .. 'profiles')}
end)

-- workers

-- Expires relative to when the worker was last seen, not to when its record is written. In the JSON only field names stand
-- before a colon, so the fields are found without decoding the whole record.
local function keep_heartbeat(s, worker_id, record)
  local key = s.p .. 'worker:' .. worker_id .. ':heartbeat'
  local seen = tonumber(record:match('"last_seen_at":([%d.eE+-]+)')) or 0
  seen = math.max(seen, tonumber(call('GET', key) or 0) or 0)
  local left = math.min(HEARTBEAT_S, math.ceil(seen + HEARTBEAT_S - now(s)))
  if left > 0 and not record:find('"is_offline":true', 1, true) then
    call('SET', key, exact(seen), 'EX', left)
  else
    drop(s, key)
  end
end

-- worker, its JSON, its profile, its registration
local function put_worker(s, args)
  put(s, s.p .. 'worker:' .. args[4], args[5])
  for place, name in ipairs({'worker_profile:', 'worker_registration:'}) do
    if args[5 + place] then
      put(s, s.p .. name .. args[4], args[5 + place])
    else
      -- An engine from before revision 12 does not send it: unknown values must not prevent a lease or a write.
      drop(s, s.p .. name .. args[4])
    end
  end
  call('ZADD', s.p .. 'workers:active', 'NX', serial(s), args[4])
  keep_heartbeat(s, args[4], args[5])
  return 1
end

define('put_worker', put_worker)

-- the same → nil if the worker exists, and nothing is written
define('add_worker', function(s, args)
  if read(s, s.p .. 'worker:' .. args[4]) then
    return nil
  end
  return put_worker(s, args)
end)

-- the same, and the expected record → nil if the record differs or is missing. An engine from before revision 15 sends no
-- expected record → nil if there is no record, or one of another registration
define('replace_worker', function(s, args)
  local known = read(s, s.p .. 'worker:' .. args[4])
  local registration = read(s, s.p .. 'worker_registration:' .. args[4])
  if not known or (args[8] and known ~= args[8]) then
    return nil
  end
  if not args[8] and args[7] and registration and registration ~= args[7] then
    return nil
  end
  return put_worker(s, args)
end)

-- worker
define('remove_worker', function(s, args)
  local worker_id = args[4]
  local blocks = read(s, s.p .. 'blocks:' .. worker_id)
  if blocks then
    for _, block in ipairs(unpacked(blocks)) do
      call('ZREM', s.p .. 'blocks:ends', worker_id .. '\0' .. block[1])
    end
  end
  call('ZREM', s.p .. 'blocks', worker_id)
  call('ZREM', s.p .. 'workers:active', worker_id)
  drop(s, s.p .. 'blocks:' .. worker_id)
  drop(s, s.p .. 'worker:' .. worker_id)
  drop(s, s.p .. 'worker_profile:' .. worker_id)
  drop(s, s.p .. 'worker_registration:' .. worker_id)
  drop(s, s.p .. 'worker:' .. worker_id .. ':heartbeat')
  drop(s, s.p .. 'commands:' .. worker_id)
  call('HDEL', s.p .. 'workers:declared', worker_id)
  call('HDEL', s.p .. 'workers:seen', worker_id)
  return 1
end)

define_reading('workers', function(s)
  local answer = {}
  for _, worker_id in ipairs(call('ZRANGE', s.p .. 'workers:active', 0, -1)) do
    answer[#answer + 1] = call('GET', s.p .. 'worker:' .. worker_id)
  end
  return answer
end)

-- workflow statistics

-- workflow hash, statistics (JSON), maximum number of workflows; then the expected statistics, or "" → nil if they differ
define('put_lesson', function(s, args)
  local lessons, order = s.p .. 'lessons', s.p .. 'lessons:order'
  if args[7] and args[7] ~= (call('HGET', lessons, args[4]) or '') then
    return nil
  end
  call('HSET', lessons, args[4], args[5])
  call('ZADD', order, serial(s), args[4])
  if call('ZCARD', order) > tonumber(args[6]) then
    call('HDEL', lessons, call('ZPOPMIN', order)[1])
  end
  return 1
end)

-- the queue

-- "1" or "0"
define('pause_queue', function(s, args)
  local was_paused = s.meta.is_paused
  s.meta.is_paused = args[4] == '1'
  if was_paused and not s.meta.is_paused then
    tell_engines(s, 'queue')
  end
  return 1
end)

-- tenant, seconds
define('charge_tenant', function(s, args)
  local seconds = tonumber(args[5])
  if seconds < 0 then
    error({err = 'CFCHARGE virtual time never falls; an overcharge is deducted from the next charge'})
  end
  local time = virtual_time(s, args[4]) + seconds
  if s.meta.is_fair then
    advance(s, share_of(s, args[4]), time)
  else
    put(s, s.p .. 'tenant:' .. args[4], exact(time))
    s.meta.top = math.max(s.meta.top, time)
  end
  return 1
end)

-- From the first terms on, the jobs of all tenants are counted.
local function begin_to_share(s)
  s.meta.is_fair = true
  for _, lane in ipairs(call('ZRANGE', s.p .. 'jobs:pending', 0, -1)) do
    local _, _, _, tenant = parts_of(lane)
    count_jobs(s, share_of(s, tenant), call('ZCARD', s.p .. 'lane:' .. lane), 0)
  end
  for _, job_id in ipairs(call('ZRANGE', s.p .. 'jobs:due', 0, -1)) do
    local job = job_of(job_id, call('GET', job_key(s, job_id)))
    if job.lease then
      count_jobs(s, share_of(s, rest(job).tenant), 0, 1)
    end
  end
end

-- tenant, its terms (JSON), weight, cap or "-", hold or "-"; the tenant alone: removes its terms
define('put_terms', function(s, args)
  if not s.meta.is_fair and args[5] then
    begin_to_share(s)
  end
  if not s.meta.is_fair then
    return 1
  end
  end_holds(s)
  local share = share_of(s, args[4])
  local was_out = is_out(s, share) or call('EXISTS', s.p .. 'out:' .. args[4]) == 1
  share.weight, share.cap, share.held = tonumber(args[6]) or 1, tonumber(args[7]), tonumber(args[8])
  share.is_changed = true
  if args[5] then
    call('HSET', s.p .. 'terms', args[4], args[5])
  else
    call('HDEL', s.p .. 'terms', args[4])
  end
  call(share.held and 'SADD' or 'SREM', s.p .. 'tenants:held', args[4])
  judge(s, share, was_out)
  find_hold_end(s)
  return 1
end)

define_reading('now', function(s)
  return exact(now(s))
end)

-- poll
define_reading('leased_by_poll', function(s, args)
  local job_id = call('GET', s.p .. 'poll:' .. args[4])
  return job_id and call('GET', job_key(s, job_id))
end)

-- workers
define_reading('leases_of', function(s, args)
  local answer = {}
  for at = 4, #args do
    for _, job_id in ipairs(active_jobs(s, args[at])) do
      answer[#answer + 1] = call('GET', job_key(s, job_id))
    end
  end
  return answer
end)

-- limit, then the end of the previous page: the due time of its last job, and that job
define_reading('due', function(s, args)
  local limit, from, last = tonumber(args[4]), args[5] or '-inf', args[6]
  local answer, passed = {}, 0
  while #answer < limit do
    local page = call('ZRANGEBYSCORE', s.p .. 'jobs:due', from, exact(now(s)), 'WITHSCORES', 'LIMIT', passed, limit)
    for place = 1, #page, 2 do
      -- Several jobs may have the same due time, and the previous page may have ended among them.
      local is_behind = not last or tonumber(page[place + 1]) > tonumber(from) or page[place] > last
      if is_behind and #answer < limit then
        answer[#answer + 1] = call('GET', job_key(s, page[place]))
      end
    end
    if #page < 2 * limit then
      break
    end
    passed = passed + limit
  end
  return answer
end)

-- job
define_reading('position', function(s, args)
  local job = load(s, args[4])
  if not job or not stands_in_lane(job) then
    return false
  end
  local ahead = 0
  local priority = rest(job).priority
  local lanes = call('ZRANGEBYSCORE', s.p .. 'jobs:pending', priority, '+inf', 'WITHSCORES')
  for place = 1, #lanes, 2 do
    local lane = s.p .. 'lane:' .. lanes[place]
    if tonumber(lanes[place + 1]) > priority then
      ahead = ahead + call('ZCARD', lane)
    else
      ahead = ahead + call('ZCOUNT', lane, '-inf', '(' .. exact(job.sequence))
    end
  end
  return ahead
end)

-- limit → for each lane with waiting jobs, by descending priority: its oldest job, how many wait, and its newest job if that
-- is another one
define_reading('waiting_lanes', function(s, args)
  local answer = {}
  for place, name in ipairs(call('ZRANGE', s.p .. 'jobs:pending', 0, tonumber(args[4]) - 1, 'REV')) do
    local lane = s.p .. 'lane:' .. name
    local waiting = call('ZCARD', lane)
    local newest = waiting > 1 and read(s, job_key(s, call('ZRANGE', lane, -1, -1)[1]))
    answer[place] = {read(s, job_key(s, call('ZRANGE', lane, 0, 0)[1])), waiting, newest}
  end
  return answer
end)

local function by_id(s, key, args)
  local first = args[5] == '' and '-' or '(' .. args[5]
  local answer = {}
  for _, job_id in ipairs(call('ZRANGEBYLEX', key, first, '+', 'LIMIT', 0, args[4])) do
    answer[#answer + 1] = call('GET', job_key(s, job_id))
  end
  return answer
end

-- limit, after which id or ""
define_reading('dead_letter', function(s, args)
  return by_id(s, s.p .. 'jobs:dead', args)
end)

-- limit, after which id or ""
define_reading('unsettled', function(s, args)
  return by_id(s, s.p .. 'jobs:unsettled', args)
end)

local function purge(s, job, ended)
  local job_id, key = job.job_id, job_key(s, job.job_id)
  call('DEL', key, key .. ':payload', key .. ':log', key .. ':result', key .. ':failure', key .. ':progress',
    s.p .. 'progress:' .. job_id)
  call('ZREM', ended, job_id)
  call('ZREM', s.p .. 'jobs', job_id)
  call('ZREM', s.p .. 'jobs:dead', job_id)
  call('ZREM', s.p .. 'jobs:due', job_id)
  local values = rest(job)
  if values.reference then
    call('HDEL', s.p .. 'references', values.tenant .. '\0' .. values.reference)
  end
  s.meta[job.phase] = s.meta[job.phase] - 1
end

-- How long a settled job is kept at least: see TOMBSTONE_S in model/dispatch.py.
local TOMBSTONE_S = 60

-- phase, before, limit. It frees memory, so it must also run when memory is full.
define('purge', function(s, args)
  local ended, before, limit = s.p .. 'jobs:' .. args[4], tonumber(args[5]), tonumber(args[6])
  local settled_before = math.min(before, now(s) - TOMBSTONE_S)
  local purged, passed, is_over = 0, 0, false
  while purged < limit and not is_over do
    local page = call('ZRANGE', ended, passed, passed + limit - 1)
    is_over = #page < limit
    for _, job_id in ipairs(page) do
      local job = load(s, job_id)
      if job.ended_at >= before then
        is_over = true
        break
      end
      if rest(job).is_apart and job.ended_at >= settled_before then
        passed = passed + 1
      elseif purged < limit then
        purge(s, job, ended)
        purged = purged + 1
      end
    end
  end
  return purged > 0 and purged
end, nil, {'allow-oom'})

-- the history of a job

-- attempt id, job, lease number
define('mark_late', function(s, args)
  local key = job_key(s, args[5]) .. ':log'
  local log = read(s, key)
  if not log then
    return false
  end
  local begun = string.format('a{"attempt_id":%s,', cjson.encode(args[4]))
  local ended = string.format('e{"lease_number":%s,', args[6])
  if not log:find(begun, 1, true) or not log:find(ended, 1, true) then
    return false
  end
  local late = string.format('l{"lease_number":%s}\n', args[6])
  if not log:find(late, 1, true) then
    call('APPEND', key, late)
  end
  return 1
end)

-- sequence to continue from or "", or the id of the last job or ""; tenant or "", phase or "", limit, maximum of jobs to look
-- at, 1 for the newest first
define_reading('list', function(s, args)
  local from, after, tenant, phase, limit = args[4], args[5], args[6], args[7], tonumber(args[8])
  local is_back = args[10] == '1'
  local jobs, beyond = s.p .. 'jobs', nil
  if from == '' and after ~= '' then
    from = call('ZSCORE', jobs, after) or ''
    -- The last job of the previous page is gone; its id still gives its time.
    beyond = from == '' and after or nil
  elseif after ~= '' then
    beyond = after
  end
  local first, last_of_all = from == '' and (is_back and '+inf' or '-inf') or '(' .. from, is_back and '-inf' or '+inf'
  local command = is_back and 'ZREVRANGEBYSCORE' or 'ZRANGEBYSCORE'
  local rows = call(command, jobs, first, last_of_all, 'WITHSCORES', 'LIMIT', 0, args[9])
  local found, last = {}, ''
  for place = 1, #rows, 2 do
    local job_id = rows[place]
    last = rows[place + 1]
    if not beyond or (is_back and job_id < beyond or not is_back and job_id > beyond) then
      local text = call('GET', job_key(s, job_id))
      local job = job_of(job_id, text)
      if (tenant == '' or rest(job).tenant == tenant) and (phase == '' or job.phase == phase) then
        local key = job_key(s, job_id)
        found[#found + 1] = {text, call('GET', key .. ':payload'), call('GET', key .. ':result'), call('GET', key .. ':failure')}
        if #found == limit then
          break
        end
      end
    end
  end
  local is_over = #rows < 2 * tonumber(args[9]) and #found < limit
  return {is_over and '' or last, beyond or '', found}
end)
