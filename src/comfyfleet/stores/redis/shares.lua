-- Part 3: fair share between tenants: terms, charges, exclusion. The rules are those of stores/inprocess/fair_share.py.
--
-- Nothing is counted or charged until the first tenant gets terms (`is_fair` in the head); from then on, all tenants are. The
-- state of a tenant is one string, read once in a call and written at its end.

local DEFAULT_CHARGE_S = 10
local SHARE = '^(%S+) ?(%S*) ?(%S*) ?(%S*) ?(%S*) ?(%S*) ?(%S*) ?(%S*)$'

local function tell_engines(s, what)
  call('PUBLISH', s.p .. 'channel:hub:events', what)
end

local function write_shares(s)
  for tenant, share in pairs(s.shares) do
    if share.is_changed then
      put(s, s.p .. 'tenant:' .. tenant, table.concat({
        exact(share.time), exact(share.credit), whole(share.waiting), whole(share.leased), share.is_behind and '1' or '0',
        exact(share.weight), share.cap and whole(share.cap) or '-', share.held and exact(share.held) or '-',
      }, ' '))
    end
  end
end

local function share_of(s, tenant)
  if not s.shares then
    s.shares, s.write_shares = {}, write_shares
  end
  local share = s.shares[tenant]
  if not share then
    local text = read(s, s.p .. 'tenant:' .. tenant) or '0'
    local time, credit, waiting, leased, is_behind, weight, cap, held = text:match(SHARE)
    share = {
      tenant = tenant, time = tonumber(time), credit = tonumber(credit) or 0, waiting = tonumber(waiting) or 0,
      leased = tonumber(leased) or 0, is_behind = is_behind == '1', weight = tonumber(weight) or 1, cap = tonumber(cap),
      held = tonumber(held),
    }
    s.shares[tenant] = share
  end
  return share
end

local function virtual_time(s, tenant)
  if s.meta.is_fair then
    return share_of(s, tenant).time
  end
  return tonumber(read(s, s.p .. 'tenant:' .. tenant) or 0)
end

local function is_open(share)
  return share.waiting > 0 or share.leased > 0
end

local function is_at_cap(share)
  return share.cap ~= nil and share.leased >= share.cap
end

local function is_out(s, share)
  return is_at_cap(share) or share.held ~= nil and now(s) < share.held
end

-- The virtual time at which a tenant starts: see `start_among` in model/tenant.py.
local function start(s, tenant)
  local names, keys = call('SMEMBERS', s.p .. 'tenants:open'), {}
  for place, name in ipairs(names) do
    keys[place] = s.p .. 'tenant:' .. name
  end
  for at = 1, #keys, 1000 do
    preload(s, {unpack(keys, at, math.min(at + 999, #keys))})
  end
  local best, time = math.huge, s.meta.top
  for _, name in ipairs(names) do
    local other = share_of(s, name)
    local rank = (other.is_behind and 2 or 0) + (other.leased == 0 and 1 or 0)
    if name ~= tenant and is_open(other) and (rank < best or rank == best and other.time < time) then
      best, time = rank, other.time
    end
  end
  return time
end

local function advance(s, share, time)
  share.time, share.is_changed = math.max(share.time, time), true
  s.meta.top = math.max(s.meta.top, share.time)
end

-- Virtual time never falls: an overcharge is deducted from the next charge.
local function charge(s, share, by)
  if by < 0 then
    share.credit, share.is_changed = share.credit - by, true
    return
  end
  local taken = math.max(0, by - share.credit)
  share.credit = math.max(0, share.credit - by)
  advance(s, share, share.time + taken)
end

-- The entries of an excluded tenant are at the end of each index, and `out:<tenant>` lists these indexes.

local function put_by(s, index, profile, entry, level)
  local tenant = entry:sub(25)
  call('ZREM', index, entry)
  call('ZADD', index, '+inf', struct.pack('>ddd', 0, 0, level) .. tenant)
  call('SADD', s.p .. 'out:' .. tenant, whole(level) .. ' ' .. profile)
end

local function bring_back(s, share)
  local out = s.p .. 'out:' .. share.tenant
  for _, place in ipairs(call('SMEMBERS', out)) do
    local level, profile = place:match('^(%S+) (.*)$')
    call('ZADD', s.p .. 'index:' .. profile, 'XX', level, struct.pack('>ddd', 0, 0, tonumber(level)) .. share.tenant)
  end
  call('DEL', out)
  if share.waiting > 0 then
    tell_engines(s, 'tenant')
  end
end

-- Called after terms or leases have changed. `was_out`: whether the tenant was excluded before.
local function judge(s, share, was_out)
  if is_out(s, share) then
    share.is_behind, share.is_changed = true, true
  elseif was_out then
    bring_back(s, share)
  end
end

local function find_hold_end(s)
  local ends = math.huge
  for _, tenant in ipairs(call('SMEMBERS', s.p .. 'tenants:held')) do
    local held = share_of(s, tenant).held
    if held and held > now(s) and held < ends then
      ends = held
    end
  end
  s.meta.hold_end = ends
end

-- Called before each look: ends the holds that are over.
local function end_holds(s)
  local ended = s.meta.hold_end
  if ended == math.huge or now(s) < ended then
    return
  end
  for _, tenant in ipairs(call('SMEMBERS', s.p .. 'tenants:held')) do
    local share = share_of(s, tenant)
    if share.held and share.held >= ended and share.held <= now(s) then
      judge(s, share, true)
    end
  end
  find_hold_end(s)
end

local function count_jobs(s, share, waiting, leased)
  local was_open = is_open(share)
  share.waiting, share.leased, share.is_changed = share.waiting + waiting, share.leased + leased, true
  if is_open(share) ~= was_open then
    call(was_open and 'SREM' or 'SADD', s.p .. 'tenants:open', share.tenant)
  end
end

local function begin_to_wait(s, share)
  advance(s, share, start(s, share.tenant))
end

-- A job leaves its lane for a worker.
local function share_lease(s, job_id, tenant, charge_s)
  local share = share_of(s, tenant)
  if share.is_behind then
    share.is_behind = false
    advance(s, share, start(s, tenant))
  end
  local by = (charge_s or DEFAULT_CHARGE_S) / share.weight
  put(s, job_key(s, job_id) .. ':charge', exact(by))
  charge(s, share, by)
  count_jobs(s, share, 0, 1)
  judge(s, share, false)
end

-- A lease ends; `ended` says how (JSON).
local function share_end(s, job_id, tenant, ended)
  local share, key = share_of(s, tenant), job_key(s, job_id) .. ':charge'
  local charged, used = read(s, key), tonumber(ended:match('"used_s":([%d.eE+-]+)'))
  if charged then
    drop(s, key)
    if used then
      charge(s, share, used / share.weight - tonumber(charged))
    end
  end
  local was_out = is_at_cap(share)
  count_jobs(s, share, 0, -1)
  judge(s, share, was_out)
end
