-- Part 4: finds the first waiting job for a profile, at a cost independent of how many jobs or classes wait.
--
-- A profile's index has two levels, (priority, tenant) and lanes. Both keep lower bounds: a lease raises the head of a lane
-- and touches no index; a bound that is too low is corrected after a look that chose another. Only a new, lower head is
-- published: as one entry at the front of the index of each profile that may take it.

local CHUNK = 16
-- How often, and how many at a time, entries of empty lanes are searched for in sets larger than a few. Two checks for each
-- added entry keep a set at about twice the size that it needs.
local TIDY_EVERY, TIDY_AT_ONCE, FEW = 64, 128, 256

local function parts_of(lane)
  local number, priority, length, rest = lane:match('^(%d+) (%-?%d+) (%d+) (.*)$')
  length = tonumber(length)
  return number, priority, rest:sub(1, length), rest:sub(length + 1)
end

-- Whether a workflow is skipped, for all tenants or for this one.
local function is_skipped(skipped, hash, tenant)
  return skipped[hash] or skipped[hash .. '@' .. tenant]
end

-- As bytes, big-endian doubles that are not negative sort like numbers. The level is included, because a job can leave a
-- bound behind at each priority that it had.
local function entry_of(time, sequence, level, tenant)
  return struct.pack('>ddd', time, sequence, level + 0) .. tenant
end

local function group_of(s, profile, priority, tenant)
  return s.p .. 'group:' .. profile .. ':' .. priority .. ':' .. tenant
end

-- Lua passes at most a few thousand arguments.
local function remove(key, members)
  for at = 1, #members, 1000 do
    call('ZREM', key, unpack(members, at, math.min(at + 999, #members)))
  end
end

-- Removes empty lanes, also for a profile that nobody polls for.
local function tidy(s, key)
  local lanes = {}
  for _, lane in ipairs(call('ZRANDMEMBER', key, TIDY_AT_ONCE)) do
    if lane:match('^%d+ %-?%d+ %d+ ') then
      lanes[#lanes + 1] = lane
    end
  end
  if #lanes == 0 then
    return
  end
  local gone = {}
  for place, priority in ipairs(call('ZMSCORE', s.p .. 'jobs:pending', unpack(lanes))) do
    if not priority then
      gone[#gone + 1] = lanes[place]
    end
  end
  remove(key, gone)
end

local function tell(s, class, lane)
  local profiles = call('SMEMBERS', s.p .. 'class:' .. class .. ':profiles')
  local index = s.p .. 'index:'
  for _, profile in ipairs(profiles) do
    redis.call('ZADD', index .. profile, '-inf', lane)
  end
  -- One call tidies only some of them.
  for place = TIDY_EVERY - s.meta.sequence % TIDY_EVERY, #profiles, TIDY_EVERY do
    if call('ZCARD', index .. profiles[place]) > FEW then
      tidy(s, index .. profiles[place])
    end
  end
end

-- An engine that found fewer jobs than it has slots waits for a hint. The next job of a class that it may take sends one, at
-- the head of a lane or behind others: the head may be blocked for it, or about to be leased. After a hint all engines look
-- again, and note again which profiles still have free slots.

local function note_search(s, profile)
  if s.sought ~= profile then
    s.sought = profile
    s.meta.sought = s.meta.sought + call('SADD', s.p .. 'profiles:sought', profile)
  end
end

local function end_search(s, profiles)
  s.sought = nil
  s.meta.sought = s.meta.sought - call('SREM', s.p .. 'profiles:sought', unpack(profiles))
end

local function hint(s, class)
  local profiles = call('SINTER', s.p .. 'profiles:sought', s.p .. 'class:' .. class .. ':profiles')
  if #profiles > 0 then
    end_search(s, profiles)
    tell_engines(s, class)
  end
end

-- The counts of waiting jobs change once in a call, at its end.
local function write_waiting(s)
  local key = s.p .. 'jobs:waiting'
  for priority, by in pairs(s.waiting) do
    if by ~= 0 and call('HINCRBY', key, priority, by) == 0 then
      call('HDEL', key, priority)
    end
  end
end

local function count_waiting(s, lane, by)
  if not s.waiting then
    s.waiting, s.write_waiting = {}, write_waiting
  end
  local priority = lane:match('^%d+ (%-?%d+)')
  s.waiting[priority] = (s.waiting[priority] or 0) + by
end

-- How many jobs of this priority or a higher one wait in lanes.
local function waiting_from(s, priority)
  if not s.waited then
    s.waited = call('HGETALL', s.p .. 'jobs:waiting')
  end
  local waited, ahead = s.waited, 0
  for place = 1, #waited, 2 do
    if tonumber(waited[place]) >= priority then
      ahead = ahead + tonumber(waited[place + 1])
    end
  end
  for level, by in pairs(s.waiting or {}) do
    if tonumber(level) >= priority then
      ahead = ahead + by
    end
  end
  return ahead
end

local function leave_lane(s, name, job_id, has_followers)
  local lane = s.p .. 'lane:' .. name
  count_waiting(s, name, -1)
  if s.meta.is_fair then
    count_jobs(s, share_of(s, select(4, parts_of(name))), -1, 0)
  end
  call('ZREM', lane, job_id)
  if not has_followers and call('EXISTS', lane) == 0 then
    call('ZREM', s.p .. 'jobs:pending', name)
  end
end

-- `had_jobs`: its tenant had waiting or leased jobs when the step began.
local function enter_lane(s, name, job_id, sequence, class, is_new, had_jobs)
  local lane = s.p .. 'lane:' .. name
  count_waiting(s, name, 1)
  if s.meta.is_fair then
    local share = share_of(s, select(4, parts_of(name)))
    if not had_jobs and not is_open(share) then
      begin_to_wait(s, share)
    end
    count_jobs(s, share, 1, 0)
  end
  call('ZADD', lane, sequence, job_id)
  -- A new job is the youngest: it is the head only if it is alone.
  local is_head
  if is_new then
    is_head = call('ZCARD', lane) == 1
  else
    is_head = call('ZRANGE', lane, 0, 0)[1] == job_id
  end
  if is_head then
    call('ZADD', s.p .. 'jobs:pending', select(2, parts_of(name)), name)
    tell(s, class, name)
  end
  if s.meta.sought > 0 then
    hint(s, class)
  end
end

local function take_in(s, profile)
  local index = s.p .. 'index:' .. profile
  local groups = {}
  for _, lane in ipairs(call('ZRANGEBYSCORE', index, '-inf', '-inf')) do
    local head = call('ZRANGE', s.p .. 'lane:' .. lane, 0, 0, 'WITHSCORES')
    if head[1] then
      local _, priority, _, tenant = parts_of(lane)
      local name = group_of(s, profile, priority, tenant)
      local group = groups[name]
      if not group then
        local first = call('ZRANGE', name, 0, 0, 'WITHSCORES')
        group = {priority = tonumber(priority), tenant = tenant, known = tonumber(first[2])}
        groups[name] = group
      end
      local sequence = tonumber(head[2])
      call('ZADD', name, 'LT', head[2], lane)
      if not group.low or sequence < group.low then
        group.low = sequence
      end
    end
  end
  call('ZREMRANGEBYSCORE', index, '-inf', '-inf')
  for name, group in pairs(groups) do
    if not group.known or group.low < group.known then
      local level = -group.priority
      call('ZADD', index, level, entry_of(virtual_time(s, group.tenant), group.low, level, group.tenant))
    elseif s.meta.sequence % TIDY_EVERY == 0 and call('ZCARD', name) > FEW then
      tidy(s, name)
    end
  end
end

local function comes_before(a, b)
  if a.level ~= b.level then
    return a.level < b.level
  end
  if a.time ~= b.time then
    return a.time < b.time
  end
  return a.sequence < b.sequence
end

-- `ahead` is sorted in descending order: the next item is the last.
local function push(ahead, item)
  local low, high = 1, #ahead + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    if comes_before(item, ahead[middle]) then
      low = middle + 1
    else
      high = middle
    end
  end
  table.insert(ahead, low, item)
end

local function page(key, offset, count)
  return call('ZRANGE', key, offset, offset + count - 1, 'WITHSCORES')
end

-- The rows of a sorted set in order: two at first, more on demand.
local function rows_of(s, key)
  return {key = key, rows = s.pages and s.pages[key] or page(key, 0, 2), at = 1, offset = 2, count = 2}
end

local function row(cursor)
  local rows = cursor.rows
  if not rows[cursor.at] and #rows == 2 * cursor.count then
    cursor.rows, cursor.at = page(cursor.key, cursor.offset, CHUNK), 1
    cursor.offset, cursor.count = cursor.offset + CHUNK, CHUNK
    rows = cursor.rows
  end
  return rows[cursor.at], rows[cursor.at + 1]
end

local function push_lane(ahead, group)
  local lane, bound = row(group.lanes)
  if lane then
    group.lanes.at = group.lanes.at + 2
    push(ahead, {level = group.level, time = group.time, sequence = tonumber(bound), group = group, lane = lane})
  end
end

local function lower(group, sequence)
  if not group.low or sequence < group.low then
    group.low = sequence
  end
end

-- After a walk: corrects the bounds of all that was visited and not taken.
local function put_right(s, index, groups, ahead, chosen)
  for _, item in ipairs(ahead) do
    if not item.cursor then
      lower(item.group, item.sequence)
    end
  end
  for name, group in pairs(groups) do
    remove(name, group.gone)
    remove(s.p .. 'jobs:pending', group.gone)
    for lane, head in pairs(group.raised) do
      if not chosen or lane ~= chosen.lane then
        call('ZADD', name, head, lane)
      end
    end
    local right = group.low and entry_of(group.time, group.low, group.level, group.tenant)
    if chosen and chosen.group == group then
      -- Its head is about to be leased: the old bound is valid, and costs no write.
      right = group.entries[1]
    end
    local stale, stands = {}, false
    for _, entry in ipairs(group.entries) do
      if entry == right then
        stands = true
      else
        stale[#stale + 1] = entry
      end
    end
    remove(index, stale)
    if right and not stands then
      call('ZADD', index, group.level, right)
    end
  end
end

local function open_group(s, profile, groups, ahead, entry, level)
  local tenant = entry:sub(25)
  local name = group_of(s, profile, whole(-level), tenant)
  local group = groups[name]
  if group then
    group.entries[#group.entries + 1] = entry
    return
  end
  group = {
    level = level, tenant = tenant, time = virtual_time(s, tenant), entries = {entry},
    lanes = rows_of(s, name), gone = {}, raised = {},
  }
  groups[name] = group
  push_lane(ahead, group)
end

local function look_into(s, ahead, item, skipped)
  local group = item.group
  push_lane(ahead, group)
  local _, _, hash, tenant = parts_of(item.lane)
  if is_skipped(skipped, hash, tenant) then
    lower(group, item.sequence)
    return
  end
  local cursor = rows_of(s, s.p .. 'lane:' .. item.lane)
  local job_id, head = row(cursor)
  if not job_id then
    group.gone[#group.gone + 1] = item.lane
    return
  end
  head = tonumber(head)
  lower(group, head)
  if head ~= item.sequence then
    group.raised[item.lane] = head
  end
  push(ahead, {
    level = item.level, time = item.time, sequence = head, group = group, lane = item.lane, job_id = job_id, cursor = cursor,
  })
end

-- Visits waiting jobs in order until `visit` returns true, and returns that job. The first `deep` jobs may be several of one
-- lane; after them only heads are visited. `skipped` has workflow hashes, "<hash>@<tenant>", and job ids.
local function walk(s, profile, skipped, deep, visit)
  local index = s.p .. 'index:' .. profile
  local entries = rows_of(s, index)
  if entries.rows[2] == '-inf' then
    take_in(s, profile)
    s.pages = nil
    entries = rows_of(s, index)
  end
  local groups, ahead, count, chosen, out = {}, {}, 0, nil, {}
  while true do
    local entry, level = row(entries)
    if level == 'inf' then
      entry = nil
    end
    local item = ahead[#ahead]
    local opens = entry ~= nil
    if entry and item then
      local time, sequence = struct.unpack('>dd', entry)
      opens = not comes_before(item, {level = tonumber(level), time = time, sequence = sequence})
    end
    if opens then
      entries.at = entries.at + 2
      if s.meta.is_fair and is_out(s, share_of(s, entry:sub(25))) then
        out[#out + 1] = {entry, tonumber(level)}
      else
        open_group(s, profile, groups, ahead, entry, tonumber(level))
      end
    elseif not item then
      break
    else
      ahead[#ahead] = nil
      if not item.cursor then
        look_into(s, ahead, item, skipped)
      else
        local is_skipped = skipped[item.job_id]
        local cursor = item.cursor
        if cursor.offset == 2 and cursor.at == 1 then
          item.has_followers = cursor.rows[3] ~= nil
        end
        if count < deep or is_skipped then
          cursor.at = cursor.at + 2
          local job_id, sequence = row(cursor)
          if job_id then
            push(ahead, {
              level = item.level, time = item.time, sequence = tonumber(sequence), group = item.group, lane = item.lane,
              job_id = job_id, cursor = cursor,
            })
          end
        end
        if not is_skipped then
          count = count + 1
          if visit(item) then
            chosen = item
            break
          end
        end
      end
    end
  end
  return chosen, function(is_taken)
    put_right(s, index, groups, ahead, is_taken and chosen or nil)
    for _, entry in ipairs(out) do
      put_by(s, index, profile, entry[1], entry[2])
    end
  end
end

-- The common case of a walk without its bookkeeping: the first job, if the bounds of all others come after it. If not, the walk
-- that follows uses the pages that were read here.
-- → job, lane, whether others wait behind it in this lane
local function first(s, profile, skipped)
  local index = s.p .. 'index:' .. profile
  local entries = page(index, 0, 2)
  s.pages = {[index] = entries}
  local entry, level = entries[1], entries[2]
  if not entry or level == '-inf' or level == 'inf' then
    return nil
  end
  local tenant = entry:sub(25)
  if s.meta.is_fair and is_out(s, share_of(s, tenant)) then
    return nil
  end
  local group = group_of(s, profile, whole(-level), tenant)
  local lanes = page(group, 0, 2)
  s.pages[group] = lanes
  local lane = lanes[1]
  if not lane then
    return nil
  end
  local key = s.p .. 'lane:' .. lane
  local jobs = page(key, 0, 2)
  s.pages[key] = jobs
  local job_id, sequence = jobs[1], tonumber(jobs[2])
  local _, _, hash = parts_of(lane)
  if not job_id or skipped[job_id] or is_skipped(skipped, hash, tenant) then
    return nil
  end
  if lanes[3] and sequence > tonumber(lanes[4]) then
    return nil
  end
  if entries[3] and tonumber(entries[4]) == tonumber(level) then
    local time, other = struct.unpack('>dd', entries[3])
    local own = virtual_time(s, tenant)
    if own > time or own == time and sequence > other then
      return nil
    end
  end
  return job_id, lane, jobs[3] ~= nil
end
