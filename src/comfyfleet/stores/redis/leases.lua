-- Part 7: leases: grant, heartbeat, and the end of a lease together with its job.

local LONGEST = 65535
-- As in ports/queue.py.
local MAX_WARM_LANES = 256

local function wants_worker(s, offer, names)
  names[#names + 1] = s.p .. 'blocks:' .. offer.worker_id
  names[#names + 1] = s.p .. 'blocks:*'
  names[#names + 1] = s.p .. 'poll:' .. offer.poll_id
  names[#names + 1] = s.p .. 'jobs:active:' .. offer.worker_id
  names[#names + 1] = s.p .. 'worker_profile:' .. offer.worker_id
end

-- The worker may have registered anew since matching, perhaps with other tenants.
local function is_as_matched(s, offer)
  local profile = read(s, s.p .. 'worker_profile:' .. offer.worker_id)
  return not profile or profile == offer.profile
end

-- The head has two bytes for a length: a longer text would make it unreadable.
local function check_names(offer)
  if #offer.worker_id > LONGEST or #offer.poll_id > LONGEST or #offer.token > LONGEST then
    error({err = 'CFCALL a worker, a poll and a token are named in at most ' .. LONGEST .. ' bytes each'})
  end
end

-- Checked first: Redis does not undo the changes of a call that fails.
local function offer_at(args, place)
  local acknowledge_s, charge_s, run_s, load_s = (args[place + 4] or ''):match('^(%S+) ?(%S*) ?(%S*) ?(%S*)$')
  local offer = {
    worker_id = args[place], profile = args[place + 1], poll_id = args[place + 2], token = args[place + 3],
    acknowledge_s = tonumber(acknowledge_s), charge_s = tonumber(charge_s), run_s = tonumber(run_s),
    load_s = tonumber(load_s),
  }
  if not offer.acknowledge_s then
    error({err = 'CFCALL an offer is worker, profile, poll, token and the seconds in which the lease must be acknowledged'})
  end
  check_names(offer)
  return offer
end

-- Turns the text of a waiting job into that of a leased one, without reading the rest of it. → the dispatch
local function grant(s, job_id, text, offer, lane, has_followers)
  local sequence, class_number, facts, _, standing, _, _, _, _, round, revision, number, attempts, _, reported, wake_at,
    cancel_requested_at, _, _, _, class_key, relaxed_class, _, _, _, record, packed_rest = struct.unpack(HEAD, text)
  local leased_at, meta, worker_id, poll_id = now(s), s.meta, offer.worker_id, offer.poll_id
  local expires_at = leased_at + offer.acknowledge_s
  meta.queued, meta.in_lane, meta.leased = meta.queued - 1, meta.in_lane - 1, meta.leased + 1
  if meta.is_fair then
    share_lease(s, job_id, select(4, parts_of(lane)), offer.charge_s)
  end
  leave_lane(s, lane, job_id, has_followers)
  score(s, s.p .. 'jobs:due', job_id, wake_at >= 0 and wake_at < expires_at and wake_at or expires_at)
  hold(s, worker_id, sequence)
  local poll = s.p .. 'poll:' .. poll_id
  local earlier = read(s, poll)
  if earlier and earlier ~= job_id then
    -- Two leases of one poll: the newer one owns the key, and the end of the older must not remove it.
    local other = load(s, earlier)
    if other then
      other.poll_moved = true
      save(s, other)
    end
  end
  put(s, poll, job_id)
  packed_rest = with_seconds(packed_rest, offer.run_s or 0, offer.load_s or 0)
  local leased = struct.pack(HEAD, sequence, class_number, facts + 1, 1, standing, 1, 0, 0, 0, round, revision + 1,
    number + 1, attempts + 1, meta.epoch, reported, wake_at, cancel_requested_at, -1, leased_at, expires_at, #class_key,
    class_key, #relaxed_class, relaxed_class, #worker_id, worker_id, #poll_id, poll_id, #offer.token, offer.token,
    #record, record, #packed_rest, packed_rest)
  put(s, s.p .. 'job:' .. job_id, leased)
  return leased
end

-- → the job, or false
local function lease_next(s, offer)
  check_names(offer)
  if s.meta.is_paused or not is_as_matched(s, offer) then
    return false
  end
  if s.meta.is_fair then
    end_holds(s)
  end
  local blocked = blocked_targets(s, offer.worker_id)
  local job_id, lane, has_followers = first(s, offer.profile, blocked)
  if not job_id then
    local chosen, put_bounds_right = walk(s, offer.profile, blocked, 1, function()
      return true
    end)
    put_bounds_right(true)
    if not chosen then
      note_search(s, offer.profile)
      return false
    end
    job_id, lane, has_followers = chosen.job_id, chosen.lane, chosen.has_followers
  end
  grant(s, job_id, read(s, s.p .. 'job:' .. job_id), offer, lane, has_followers)
  return job_id
end

-- Ends a lease and its job. This is the most common write, so it changes the text without decoding it; the effect is that of
-- `write`. Its arguments begin at `at`: job, round, number, epoch, token, phase, end of the attempt (JSON), phase of the record,
-- record (MessagePack map or ""), result (JSON or ""), "1" to remove an earlier failure, facts as in `enqueue`
-- → the dispatch, or false
local function finish(s, args, at, last)
  local job_id, phase = args[at], args[at + 5]
  local key = s.p .. 'job:' .. job_id
  local text = read(s, key)
  if not text then
    return false
  end
  local sequence, class_number, facts, _, standing, _, _, poll_moved, is_noted, round, revision, number, attempts, epoch,
    reported, _, cancel_requested_at, _, leased_at, _, class_key, relaxed_class, worker_id, poll_id, token, record,
    packed_rest = struct.unpack(HEAD, text)
  if epoch == 0 or round ~= tonumber(args[at + 1]) or number ~= tonumber(args[at + 2])
    or epoch ~= tonumber(args[at + 3]) or token ~= args[at + 4] then
    return false
  end
  local ended_at, meta = now(s), s.meta
  if not FINAL[phase] or last < at + 11 then
    error({err = 'CFCALL a lease is finished with twelve arguments, and to an end'})
  end
  local begun = is_noted == 1 and '' or attempt_line(job_id, args[at + 1], args[at + 2], args[at + 3], worker_id,
    leased_at, attempts)
  local facts_at = at + 11
  local lines, count = table.concat(args, now_text(s), facts_at, last), last - facts_at
  call('APPEND', key .. ':log', begun .. end_line(s, args[at + 2], args[at + 6]) .. lines)
  let_go(s, worker_id, sequence)
  if poll_moved == 0 then
    drop(s, s.p .. 'poll:' .. poll_id)
  end
  if meta.is_fair then
    share_end(s, job_id, unpacked(packed_rest).tenant, args[at + 6])
  end
  meta.leased, meta[phase] = meta.leased - 1, meta[phase] + 1
  local values = unpacked(packed_rest)
  meta.payload_bytes = meta.payload_bytes - (values.payload_bytes or 0)
  pin(s, class_key, -1)
  if relaxed_class ~= '' then
    pin(s, relaxed_class, -1)
  end
  if values.is_apart then
    score(s, s.p .. 'jobs:unsettled', job_id, 0)
  else
    score(s, s.p .. 'jobs:' .. phase, job_id, serial(s))
  end
  if phase == 'failed' then
    score(s, s.p .. 'jobs:dead', job_id, 0)
  end
  score(s, s.p .. 'jobs:due', job_id, false)
  local changed = args[at + 8]
  if record == '' then
    record = changed
  elseif changed ~= '' then
    record = changed_record(record, unpacked(changed))
  end
  if args[at + 9] ~= '' then
    put(s, key .. ':result', args[at + 9])
  end
  if args[at + 10] == '1' then
    drop(s, key .. ':failure')
  end
  local ended = struct.pack(HEAD, sequence, class_number, facts + count, PHASE_CODES[phase], standing,
    PHASE_CODES[args[at + 7]], 0, poll_moved, 0, round, revision + 1, number, attempts, 0, reported, -1,
    cancel_requested_at, ended_at, -1, -1, #class_key, class_key, #relaxed_class, relaxed_class, 0, '', 0, '', 0, '',
    #record, record, #packed_rest, packed_rest)
  put(s, key, ended)
  return ended
end

local function extend(s, job, till)
  local was_due = due_at(job)
  -- A heartbeat never shortens a lease: two of them can arrive in the wrong order.
  job.lease.expires_at = math.max(job.lease.expires_at, till)
  job.lease.is_acknowledged = true
  job.revision = job.revision + 1
  set_due(s, job, was_due)
  save(s, job)
  return stop_of(job) and 2 or 1
end

-- job, worker, profile, poll, token, "<seconds until the first heartbeat> <seconds to charge its tenant> <seconds of the run>
-- <seconds of its loads>"
define('lease', function(s, args)
  local job, offer = load(s, args[4]), s.offer
  check_names(offer)
  if not job or not stands_in_lane(job) or s.meta.is_paused or not is_as_matched(s, offer) then
    return false
  end
  if call('SISMEMBER', s.p .. 'profile:' .. offer.profile .. ':classes', job.class_key) == 0 then
    return false
  end
  local blocked, values = blocked_targets(s, offer.worker_id), rest(job)
  if blocked[job.job_id] or is_skipped(blocked, values.workflow_hash, values.tenant) then
    return false
  end
  if s.meta.is_fair then
    end_holds(s)
    if is_out(s, share_of(s, values.tenant)) then
      return false
    end
  end
  return grant(s, job.job_id, read(s, job_key(s, job.job_id)), offer, lane_of(job))
end, function(s, args, names)
  s.offer = offer_at(args, 5)
  names[#names + 1] = job_key(s, args[4])
  wants_worker(s, s.offer, names)
end)

-- see `finish`
define_joined('finish', function(s, args, at, last)
  return finish(s, args, at, last)
end, function(s, args, names, at)
  names[#names + 1] = job_key(s, args[at])
end)

-- → whether the class of lane `a` comes before that of `b`, as bytes: Lua compares as the server's language sorts.
local function is_before(a, b)
  for at = 1, math.min(#a, #b) do
    local here, there = a:byte(at), b:byte(at)
    if here ~= there then
      return here < there
    end
  end
  return #a < #b
end

-- The lanes of a class at one priority stand together in jobs:pending, which sorts by priority, then by name. → at most `limit`
local function lanes_of(s, number, priority, limit)
  local key, prefix = s.p .. 'jobs:pending', number .. ' '
  local low = call('ZCOUNT', key, '-inf', '(' .. priority)
  local last = low + call('ZCOUNT', key, priority, priority)
  local high = last
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_before(call('ZRANGE', key, middle, middle)[1], prefix) then
      low = middle + 1
    else
      high = middle
    end
  end
  local lanes = {}
  for place, lane in ipairs(low < last and call('ZRANGE', key, low, math.min(last, low + limit) - 1) or NONE) do
    if lane:sub(1, #prefix) ~= prefix then
      break
    end
    lanes[place] = lane
  end
  return lanes
end

-- The first heads of lanes of warm classes, of tenants until `latest`, that are not seen yet.
local function warm_heads(s, profile, warm, level, latest, skipped, seen)
  local found, limit = {}, math.max(1, math.floor(MAX_WARM_LANES / #warm))
  for _, class in ipairs(warm) do
    local number = class_number(s, class)
    if number and call('SISMEMBER', s.p .. 'profile:' .. profile .. ':classes', class) == 1 then
      for _, lane in ipairs(lanes_of(s, number, whole(-level), limit)) do
        local _, _, hash, tenant = parts_of(lane)
        local time = virtual_time(s, tenant)
        if not seen[lane] and time <= latest and not is_skipped(skipped, hash, tenant)
          and not (s.meta.is_fair and is_out(s, share_of(s, tenant))) then
          local cursor = rows_of(s, s.p .. 'lane:' .. lane)
          local job_id, sequence = row(cursor)
          while job_id and skipped[job_id] do
            cursor.at = cursor.at + 2
            job_id, sequence = row(cursor)
          end
          if job_id then
            found[#found + 1] = {
              job_id = job_id, sequence = tonumber(sequence), time = time, level = level, lane = lane, group = {tenant = tenant},
            }
          end
        end
      end
    end
  end
  table.sort(found, comes_before)
  return found
end

-- profile, worker, slots, lanes, "<quantum> <number of warm classes>", warm classes, then workflow hashes to skip. An engine from
-- before revision 24 sends the quantum alone.
-- → for each job: the dispatch, the virtual time and the weight of its tenant, how many jobs wait in its lane
define('peek', function(s, args)
  if s.meta.is_paused then
    return {}
  end
  if s.meta.is_fair then
    end_holds(s)
  end
  local skipped = blocked_targets(s, args[5])
  local slots, lanes, quantum, warm = tonumber(args[6]), tonumber(args[7]), args[8]:match('^(%S+) ?(%d*)$')
  quantum, warm = tonumber(quantum), tonumber(warm) or 0
  for i = 9 + warm, #args do
    skipped[args[i]] = true
  end
  warm = {unpack(args, 9, 8 + warm)}
  local is_warm = #warm > 0
  local found, seen, seen_count, level, least = {}, {}, 0, nil, 0
  local _, put_bounds_right = walk(s, args[4], skipped, slots, function(item)
    if #found >= slots then
      if is_warm and #found > 0 then
        is_warm = false
        for _, head in ipairs(warm_heads(s, args[4], warm, level, least + quantum, skipped, seen)) do
          if seen_count < lanes then
            seen[head.lane] = true
            seen_count = seen_count + 1
            found[#found + 1] = head
          end
        end
      end
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
  if #found < slots then
    note_search(s, args[4])
  end
  if #warm > 0 then
    table.sort(found, comes_before)
  end
  local answer, lengths = {}, {}
  for place, item in ipairs(found) do
    local weight, lane = s.meta.is_fair and share_of(s, item.group.tenant).weight or 0, item.lane
    lengths[lane] = lengths[lane] or call('ZCARD', s.p .. 'lane:' .. lane)
    answer[place] = {read(s, job_key(s, item.job_id)), exact(item.time), exact(weight), lengths[lane]}
  end
  return answer
end)

-- ttl, then job, round, number, epoch and token of each lease → for each: 0 lost, 1 alive, 2 alive and the job must be stopped
define('heartbeat', function(s, args)
  local till, answer, workers = now(s) + tonumber(args[4]), {}, {}
  for place = 5, #args, 5 do
    local job, state = load(s, args[place]), 0
    if job and is_held(job, ref_at(args, place)) then
      state = extend(s, job, till)
      workers[job.lease.worker_id] = true
    end
    answer[#answer + 1] = state
  end
  for worker_id in pairs(workers) do
    call('SET', s.p .. 'worker:' .. worker_id .. ':heartbeat', now_text(s), 'EX', HEARTBEAT_S)
  end
  return answer
end, function(s, args, names)
  for place = 5, #args, 5 do
    names[#names + 1] = job_key(s, args[place])
  end
end)
