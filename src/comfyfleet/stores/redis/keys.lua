-- Part 1 of the function library: the layout of the keys, and how every function begins and ends.
--
-- All keys share one prefix with one hash tag, by default `{cf}:`, so they are on one shard. Each call declares one key,
-- `<prefix>meta`, and builds the others from it. A name that begins with `!` follows the hash tag without a colon
-- (`{cf}!cabinet`): the users of direct workers may access only `{cf}:*`.
--
--   meta                      string   head of the fleet: sixteen little-endian doubles as in META below, the run; after the first charge also "1" if
--                                      tenants have terms (else "0"), the greatest virtual time, the next end of a hold and "c" if `jobs:waiting` is
--                                      counted; \0, bytes of open payloads
--   request:<client>:<slot>   string   "<number> <answer>": the last answer given to this slot, for a call that is repeated
--   clients                   zset     client -> when it was last seen (its slots are dropped a day later)
--
--   job:<id>                  string   the dispatch: HEAD of jobs.lua, then the rest (MessagePack map)
--   job:<id>:payload          string   the job's record as it was submitted (JSON)
--   job:<id>:result, :failure string   its result or failure (JSON)
--   job:<id>:log              string   lines: f<fact>, a<attempt begun, a fact too>, e<attempt ended>, l<late> (JSON each)
--   job:<id>:progress         string   the newest progress (JSON), expires
--   jobs                      zset     every job -> sequence
--   jobs:pending              zset     lane -> priority: the lanes with waiting jobs
--   jobs:waiting              hash     priority -> number of jobs that wait in lanes
--   lane:<lane>               zset     job -> sequence: the waiting jobs of the lane
--   jobs:active:<worker>      string   " <sequence> " of each job leased by this worker, oldest first
--   jobs:completed, :failed, :cancelled   zset   job -> serial: in the order of their ends, without unsettled jobs
--   jobs:unsettled            zset     ended jobs that a tenant database has yet to settle, by id (all scores 0)
--   jobs:dead                 zset     the failed jobs by id (all scores 0)
--   progress:<job>            stream   the last hundred reports of progress, expires
--   jobs:due                  zset     job -> the time at which an engine must act on it
--   poll:<id>                 string   the job leased under this poll
--   references                hash     "<tenant>\0<reference>" -> job
--   tenant:<tenant>           string   its virtual time; once tenants have terms, also its credit, its waiting and leased jobs, whether it was
--                                      excluded ("1"), weight, cap and hold ("-": none)
--   job:<id>:charge           string   the virtual time that its lease was charged
--   terms                     hash     tenant -> its terms (JSON)
--   tenants:open              set      tenants with waiting or leased jobs, once tenants have terms
--   tenants:held              set      tenants that have, or had, a hold in their terms
--   out:<tenant>              set      "<-priority> <profile>": the indexes in which its entries are set aside while it is excluded
--
--   classes                   hash     class -> requirement class (JSON)
--   classes:numbers           hash     class -> number (a dropped class gets a new number when it returns)
--   classes:idle              zset     class -> serial: classes without open jobs, longest idle first
--   classes:pins              hash     class -> number of its open jobs
--   class:<class>:profiles    set      profiles that may take it
--   profiles                  set      all profiles
--   profiles:sought           set      profiles for which a look found too little since the last hint
--   profile:<profile>:classes set      classes it may take
--   index:<profile>           zset     level 1: <virtual time><sequence><-priority><tenant> -> -priority (excluded tenant: inf); new heads: <lane> -> -inf
--   group:<profile>:<priority>:<tenant>   zset   level 2: lane -> lower bound of its head
--
--   workers:active            zset     worker -> serial: in the order of their first registration
--   worker:<id>               string   its record (JSON)
--   worker:<id>:heartbeat     string   when it was last seen; expires 60 s later
--   worker_profile:<id>       string   its profile: a lease must name this profile
--   worker_registration:<id>  string   the registration of its record: a change based on an earlier one is not written
--   worker:<id>:refused       string   digest of its declaration, and why an engine refused it, expires
--   workers:waiting           hash     worker -> its declaration (JSON), until an engine admits it
--   workers:declared          hash     direct worker -> digest of the declaration that was admitted
--   workers:seen              hash     direct worker -> when it last called
--   commands:<worker>         stream   the last hundred commands for it, expires
--   blocks                    zset     workers with blocks -> serial
--   blocks:<worker>           string   its blocks, oldest first: {target, until or false, block} (MessagePack); the worker
--                                      "*" means all workers
--   blocks:ends               zset     "<worker>\0<target>" -> until
--   lessons, lessons:order    hash, zset   workflow hash -> statistics (JSON), serial
--   reports                   list     failures that direct workers reported, for an engine to handle (JSON)
--   watched                   string   present while a client of an engine watches a job or the fleet, expires
--   finished                  list     runs that direct workers completed, for an engine's statistics (JSON)
--   !cabinet                  set      the collections that have documents
--   !cabinet:<collection>         hash     name -> "<version> <body>": the documents of a collection
--   !cabinet:<collection>:names   zset     the names in order (all scores 0)
--   channel:hub:events        channel  hints that jobs wait which a look missed, or that the table changed; may be lost
--   channel:worker:<id>       channel  commands for this worker, as in its stream; may be lost
--   channel:workers:all       channel  all commands to all workers, for engines; while `watched` is present, also events of direct workers
--
-- Every function has the same first three arguments: the request ("<client>:<slot>", or "" if it is never repeated), its
-- number, and the time ("" except in a fleet opened for tests). Times are seconds, written with 17 digits.

local REVISION = 26

-- While this text is loaded, `redis.call` and the libraries do not exist yet.
local function call(...)
  return redis.call(...)
end

local function pack(value)
  return cmsgpack.pack(value)
end

local function unpacked(text)
  return cmsgpack.unpack(text)
end

local HEARTBEAT_S = 60
local CLIENT_S = 86400
-- A client's time is written at the first use of a slot, and then once in so many calls.
local NOTED_EVERY = 1024
local SLOTS_MISSED = 32

local function exact(number)
  return string.format('%.17g', number)
end

local function whole(number)
  return string.format('%d', number)
end

local META = '<dddddddddddddddd'

-- A cache of the decoded head after the last call, by prefix; valid if the text is the same. It is empty during a call, so
-- that a call that fails leaves no half-changed table behind.
local LAST = {}

local function meta_of(s, text)
  local last = LAST[s.p]
  LAST[s.p] = nil
  if last and last.text == text then
    return last
  end
  local epoch, version, sequence, serial, classes, is_paused, winds, queued, leased, completed, failed, cancelled,
    in_lane, delayed, paused, sought, at = struct.unpack(META, text)
  -- Before revision 6 the head ended with the run.
  local run, is_fair, top, hold_end, is_counted, payload_bytes =
    text:match('^([^%z ]*) ?(%d?) ?([^%z ]*) ?([^%z ]*) ?(c?)%z?(%d*)$', at)
  return {
    epoch = epoch, version = version, sequence = sequence, serial = serial, classes = classes,
    is_paused = is_paused == 1, winds = winds == 1, queued = queued, leased = leased, completed = completed,
    failed = failed, cancelled = cancelled, in_lane = in_lane, delayed = delayed, paused = paused, sought = sought, run = run,
    payload_bytes = tonumber(payload_bytes) or 0, is_fair = is_fair == '1', top = tonumber(top) or 0,
    hold_end = tonumber(hold_end) or math.huge, is_counted = is_counted == 'c', text = text,
  }
end

local function meta_text(m)
  return struct.pack(META, m.epoch, m.version, m.sequence, m.serial, m.classes, m.is_paused and 1 or 0,
    m.winds and 1 or 0, m.queued, m.leased, m.completed, m.failed, m.cancelled, m.in_lane, m.delayed, m.paused,
    m.sought) .. m.run .. ((m.is_fair or m.top > 0)
    and (m.is_fair and ' 1 ' or ' 0 ') .. exact(m.top) .. ' ' .. exact(m.hold_end) or ' 0 0 inf')
    .. (m.is_counted and ' c\0' or '\0') .. whole(m.payload_bytes)
end

-- String keys are read once and written together at the end, with one MSET and one DEL. So are scores that nothing reads
-- in between. Calls that are sent together share this work.

local function read(s, key)
  local value = s.cache[key]
  if value == nil then
    value = call('GET', key)
    s.cache[key] = value
  end
  return value
end

local function preload(s, names)
  local values, cache = call('MGET', unpack(names)), s.cache
  for place = 1, #names do
    if cache[names[place]] == nil then
      cache[names[place]] = values[place]
    end
  end
end

local function put(s, key, value)
  s.cache[key] = value
  local sets, place = s.sets, s.places[key]
  if not place then
    place = #sets + 1
    s.places[key] = place
    sets[place] = key
  end
  sets[place + 1] = value
  if s.drops then
    s.drops[key] = nil
  end
end

local function drop(s, key)
  s.cache[key] = false
  s.drops = s.drops or {}
  s.drops[key] = true
end

-- false removes the member.
local function score(s, key, member, value)
  local scores = s.scores[key]
  if not scores then
    scores = {}
    s.scores[key] = scores
  end
  scores[member] = value
end

local function write_scores(s)
  for key, scores in pairs(s.scores) do
    local added, removed = {}, {}
    for member, value in pairs(scores) do
      if value then
        local count = #added
        added[count + 1], added[count + 2] = value, member
      else
        removed[#removed + 1] = member
      end
    end
    if #added > 0 then
      call('ZADD', key, unpack(added))
    end
    if #removed > 0 then
      call('ZREM', key, unpack(removed))
    end
  end
end

local function serial(s)
  s.meta.serial = s.meta.serial + 1
  return s.meta.serial
end

local function now(s)
  if not s.now then
    if s.time == '' then
      local time = call('TIME')
      s.now = tonumber(time[1]) + tonumber(time[2]) / 1000000
    elseif s.meta.winds then
      s.now = tonumber(s.time)
    else
      error({err = 'CFTIME this fleet runs on the clock of its server; only one opened for tests takes the time from a caller'})
    end
  end
  return s.now
end

local function now_text(s)
  if not s.now_text then
    s.now_text = exact(now(s))
  end
  return s.now_text
end

local function open(keys, args, wants)
  local meta = keys[1]
  if #keys ~= 1 or meta:sub(-4) ~= 'meta' or #args < 3 then
    error({err = 'CFCALL declare one key, <prefix>meta, and begin the arguments with request, number and time'})
  end
  local names = {meta}
  local cache = {}
  local s = {p = meta:sub(1, -5), cache = cache, sets = {}, places = {}, scores = {}, time = args[3]}
  if args[1] ~= '' then
    s.request = s.p .. 'request:' .. args[1]
    s.number = args[2]
    names[2] = s.request
  end
  if wants then
    wants(s, args, names)
  end
  preload(s, names)
  local head, last = cache[meta], s.request and cache[s.request]
  if last then
    local length = #s.number
    if last:byte(length + 1) == 32 and last:sub(1, length) == s.number then
      local answer = last:sub(length + 3)
      s.answer = last:byte(length + 2) == 116 and {answer} or unpacked(answer)
      return s
    end
    -- A late copy from a closed connection: its caller already has an answer.
    if (tonumber(s.number) or math.huge) < (tonumber(last:match('^%S+')) or 0) then
      error({err = 'CFREPEATED this slot has gone on to a later number: nothing was done'})
    end
  end
  if head then
    s.meta = meta_of(s, head)
  end
  return s
end

local function client_of(s)
  return s.request and (s.request:sub(#s.p + #'request:' + 1):match('^(.*):') or s.request) or ''
end

local function note_client(s)
  call('ZADD', s.p .. 'clients', call('TIME')[1], client_of(s))
end

local function forget_clients(s, before)
  for _, client in ipairs(call('ZRANGEBYSCORE', s.p .. 'clients', '-inf', before, 'LIMIT', 0, 8)) do
    local slot, missed = 0, 0
    while missed < SLOTS_MISSED do
      missed = call('DEL', s.p .. 'request:' .. client .. ':' .. slot) == 1 and 0 or missed + 1
      slot = slot + 1
    end
    call('ZREM', s.p .. 'clients', client)
  end
end

-- Open jobs pin their class. A class without pins is idle; the longest idle classes are dropped first.

local function pin(s, class, by)
  if not s.pins then
    s.pins, s.pinned = {}, {}
  end
  if not s.pins[class] then
    s.pins[class] = 0
    s.pinned[#s.pinned + 1] = class
  end
  s.pins[class] = s.pins[class] + by
end

local function write_pins(s)
  local pins, idle = s.p .. 'classes:pins', s.p .. 'classes:idle'
  for _, class in ipairs(s.pinned) do
    local by = s.pins[class]
    local count = by ~= 0 and call('HINCRBY', pins, class, by)
    if count == 0 then
      call('HDEL', pins, class)
      call('ZADD', idle, serial(s), class)
    elseif count and count == by then
      call('ZREM', idle, class)
    end
  end
end

-- Counts the jobs that wait at each priority, once in a fleet from before revision 24.
local function count_lanes(s)
  local key, lanes = s.p .. 'jobs:waiting', call('ZRANGE', s.p .. 'jobs:pending', 0, -1, 'WITHSCORES')
  call('DEL', key)
  for place = 1, #lanes, 2 do
    local waiting = call('ZCARD', s.p .. 'lane:' .. lanes[place])
    if waiting > 0 then
      call('HINCRBY', key, whole(tonumber(lanes[place + 1])), waiting)
    end
  end
  s.meta.is_counted = true
end

-- A negative answer is not remembered: it changed nothing, and a repeated call may succeed. A text is kept after a "t",
-- any other answer as MessagePack after an "m".
local function close(s, answer)
  if s.pins then
    write_pins(s)
  end
  if s.shares then
    s.write_shares(s)
  end
  if s.waiting then
    s.write_waiting(s)
  end
  write_scores(s)
  local meta, sets, count = s.meta, s.sets, #s.sets
  local text = meta_text(meta)
  if text ~= meta.text then
    sets[count + 1], sets[count + 2] = s.p .. 'meta', text
    count = count + 2
    meta.text = text
  end
  if s.request and answer then
    local kept = type(answer) == 'string' and s.number .. ' t' .. answer or s.number .. ' m' .. pack({answer})
    sets[count + 1], sets[count + 2] = s.request, kept
    count = count + 2
    if not s.cache[s.request] or s.number % NOTED_EVERY == 0 then
      note_client(s)
    end
  end
  if count > 0 then
    call('MSET', unpack(sets))
  end
  if s.drops and next(s.drops) then
    local drops = {}
    for key in pairs(s.drops) do
      drops[#drops + 1] = key
    end
    call('DEL', unpack(drops))
  end
  LAST[s.p] = meta
  return answer
end

local function run(body, wants, keys, args, is_reading)
  local s = open(keys, args, wants)
  if s.answer then
    return s.answer[1]
  end
  if not s.meta then
    error({err = 'CFCLOSED there is no fleet under this prefix: an engine opens it first'})
  end
  if s.time ~= '' then
    now(s)
  end
  if not s.meta.is_counted and not is_reading then
    count_lanes(s)
  end
  local answer = body(s, args)
  if is_reading then
    LAST[s.p] = s.meta
    return answer
  end
  return close(s, answer)
end

-- `wants` names the string keys that the body will read, so that one MGET reads them all.
local function define(name, body, wants, flags)
  redis.register_function({
    function_name = 'cf1_' .. name,
    callback = function(keys, args)
      return run(body, wants, keys, args, false)
    end,
    flags = flags or {},
  })
end

-- Functions that `many` may call: `body` and `wants` also get the positions of their first and last argument.
local JOINED = {}

local function define_joined(name, body, wants)
  JOINED[name] = {body = body, wants = wants}
  define(name, function(s, args)
    return body(s, args, 4, #args)
  end, function(s, args, names)
    wants(s, args, names, 4)
  end)
end

-- for each call: name, number of arguments, arguments → an answer for each; an error is the answer of its call only
define('many', function(s, args)
  local answers, at = {}, 4
  while at < #args do
    local last = at + 1 + tonumber(args[at + 1])
    local is_done, answer = pcall(JOINED[args[at]].body, s, args, at + 2, last)
    if not is_done and type(answer) ~= 'table' then
      answer = {err = 'ERR ' .. tostring(answer)}
    end
    answers[#answers + 1] = answer
    at = last + 1
  end
  return answers
end, function(s, args, names)
  local at = 4
  while at < #args do
    local joined = JOINED[args[at]]
    if not joined then
      error({err = 'CFCALL only enqueue and finish are called many at a time'})
    end
    joined.wants(s, args, names, at + 2)
    at = at + 2 + tonumber(args[at + 1])
  end
end)

local function define_reading(name, body)
  redis.register_function({
    function_name = 'cf1_' .. name,
    callback = function(keys, args)
      return run(body, nil, keys, args, true)
    end,
    flags = {'no-writes'},
  })
end

redis.register_function({
  function_name = 'cf1_revision',
  callback = function()
    return REVISION
  end,
  flags = {'no-writes'},
})

-- run: identifies the server and its replication history. winds: "1" opens a new fleet for tests.
redis.register_function('cf1_open', function(keys, args)
  local s = open(keys, args)
  local run_id, winds = args[4], args[5] == '1'
  if not s.meta then
    s.meta = {
      epoch = 1, run = run_id, winds = winds, version = 0, sequence = 0, serial = 0, classes = 0, is_paused = false,
      queued = 0, leased = 0, completed = 0, failed = 0, cancelled = 0, in_lane = 0, delayed = 0, paused = 0, sought = 0,
      payload_bytes = 0, is_fair = false, top = 0, hold_end = math.huge, is_counted = true, text = '',
    }
  elseif winds and not s.meta.winds then
    error({err = 'CFTIME this fleet runs on the clock of its server; open another prefix for tests'})
  elseif s.meta.run ~= run_id then
    -- Another server or history: it may have lost leases, whose numbers will be given again.
    s.meta.epoch = s.meta.epoch + 1
    s.meta.run = run_id
  end
  if not s.meta.is_counted then
    count_lanes(s)
  end
  forget_clients(s, call('TIME')[1] - CLIENT_S)
  close(s, false)
  return {s.meta.epoch, REVISION}
end)
