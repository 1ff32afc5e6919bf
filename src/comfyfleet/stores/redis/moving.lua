-- Part 10: imports jobs from another store, and discards jobs that moved to one.

local function reference_of(job)
  local values = rest(job)
  return values.reference and values.tenant .. '\0' .. values.reference
end

local function known_as(s, job)
  if read(s, job_key(s, job.job_id)) then
    return job.job_id
  end
  local reference = reference_of(job)
  return reference and call('HGET', s.p .. 'references', reference)
end

-- for each job: dispatch (see jobs.lua; the library sets its place and class number), payload (JSON), log, result or "",
-- failure or "" (JSON)
define('adopt', function(s, args)
  local jobs = {}
  for i = 4, #args, 5 do
    local job = job_of('', args[i])
    job.job_id = rest(job).job_id
    if job.lease or not FINAL[job.phase] and not has_classes(s, job) then
      return false
    end
    jobs[#jobs + 1] = job
  end
  local answer = {}
  for place, job in ipairs(jobs) do
    local known = known_as(s, job)
    if known then
      answer[place] = read(s, job_key(s, known))
    else
      local key, at = job_key(s, job.job_id), 4 + (place - 1) * 5
      local reference = reference_of(job)
      if reference then
        call('HSET', s.p .. 'references', reference, job.job_id)
      end
      s.meta.sequence = s.meta.sequence + 1
      job.sequence = s.meta.sequence
      call('ZADD', s.p .. 'jobs', job.sequence, job.job_id)
      put(s, key .. ':payload', args[at + 1])
      put(s, key .. ':log', args[at + 2])
      for offset, name in pairs({[3] = ':result', [4] = ':failure'}) do
        if args[at + offset] ~= '' then
          put(s, key .. name, args[at + offset])
        end
      end
      -- It waited in the other store, and the virtual time of its tenant moves along.
      move(s, nil, job, true)
      answer[place] = save(s, job)
    end
  end
  return answer
end)

local function forget(s, job)
  local key = job_key(s, job.job_id)
  count(s, job.phase, job.standing, -1)
  if FINAL[job.phase] then
    call('ZREM', s.p .. 'jobs:' .. job.phase, job.job_id)
    call('ZREM', s.p .. 'jobs:dead', job.job_id)
    call('ZREM', s.p .. 'jobs:unsettled', job.job_id)
  else
    weigh(s, job, -1)
    pin(s, job.class_key, -1)
    if job.relaxed_class then
      pin(s, job.relaxed_class, -1)
    end
    if stands_in_lane(job) then
      leave_lane(s, lane_of(job), job.job_id)
    end
  end
  call('ZREM', s.p .. 'jobs', job.job_id)
  call('ZREM', s.p .. 'jobs:due', job.job_id)
  local reference = reference_of(job)
  if reference then
    call('HDEL', s.p .. 'references', reference)
  end
  for _, name in ipairs({'', ':payload', ':log', ':result', ':failure', ':progress'}) do
    drop(s, key .. name)
  end
  drop(s, s.p .. 'progress:' .. job.job_id)
end

-- job, revision, job, revision … → for each: 1 deleted, 0 it has changed
define('discard', function(s, args)
  local answer = {}
  for i = 4, #args, 2 do
    local job = load(s, args[i])
    local is_as_read = job and not job.lease and job.revision == tonumber(args[i + 1])
    if is_as_read then
      forget(s, job)
    end
    answer[#answer + 1] = is_as_read and 1 or 0
  end
  return answer
end)
