-- Part 5: blocks. A worker does not get a blocked target until the block ends. A target is a workflow hash,
-- "<hash>@<tenant>" (only that tenant's jobs) or a job id. A block of the worker "*" applies to all workers.

local function blocked_targets(s, worker_id)
  local targets = {}
  for _, name in ipairs({worker_id, '*'}) do
    local text = read(s, s.p .. 'blocks:' .. name)
    for _, block in ipairs(text and unpacked(text) or {}) do
      if block[2] and now(s) < block[2] then
        targets[block[1]] = true
      end
    end
  end
  return targets
end

local function put_block(s, block)
  local worker_id, target, till, text = block[1], block[2], block[3], block[4]
  local key = s.p .. 'blocks:' .. worker_id
  local known, blocks = read(s, key), {}
  if known then
    for _, each in ipairs(unpacked(known)) do
      if each[1] ~= target then
        blocks[#blocks + 1] = each
      end
    end
  else
    call('ZADD', s.p .. 'blocks', serial(s), worker_id)
  end
  blocks[#blocks + 1] = {target, till, text}
  local ends = s.p .. 'blocks:ends'
  if #blocks > block[5] then
    -- A count towards a block is evicted before a block in force.
    local oldest = 1
    for place, each in ipairs(blocks) do
      if not each[2] then
        oldest = place
        break
      end
    end
    call('ZREM', ends, worker_id .. '\0' .. table.remove(blocks, oldest)[1])
  end
  if till then
    call('ZADD', ends, till, worker_id .. '\0' .. target)
  else
    call('ZREM', ends, worker_id .. '\0' .. target)
  end
  put(s, key, pack(blocks))
end

local function lift_block(s, worker_id, target)
  local key = s.p .. 'blocks:' .. worker_id
  local known = read(s, key)
  if not known then
    return nil
  end
  local kept, lifted = {}, nil
  for _, each in ipairs(unpacked(known)) do
    if each[1] == target then
      lifted = each
    else
      kept[#kept + 1] = each
    end
  end
  if not lifted then
    return nil
  end
  call('ZREM', s.p .. 'blocks:ends', worker_id .. '\0' .. target)
  if #kept > 0 then
    put(s, key, pack(kept))
  else
    drop(s, key)
    call('ZREM', s.p .. 'blocks', worker_id)
  end
  return lifted[3]
end

-- block (MessagePack: worker, target, until or false, block, maximum for a worker)
define('put_block', function(s, args)
  put_block(s, unpacked(args[4]))
  return 1
end)

-- worker, target, worker, target …
define('lift', function(s, args)
  local answer = {}
  for i = 4, #args, 2 do
    answer[#answer + 1] = lift_block(s, args[i], args[i + 1])
  end
  return answer
end)

define('expired_blocks', function(s)
  local answer = {}
  for _, pair in ipairs(call('ZRANGEBYSCORE', s.p .. 'blocks:ends', '-inf', exact(now(s)))) do
    local at = pair:find('\0', 1, true)
    answer[#answer + 1] = lift_block(s, pair:sub(1, at - 1), pair:sub(at + 1))
  end
  return #answer > 0 and answer
end)

-- worker, or "" for all
define_reading('blocks', function(s, args)
  local workers = args[4] ~= '' and {args[4]} or call('ZRANGE', s.p .. 'blocks', 0, -1)
  local answer = {}
  for _, worker_id in ipairs(workers) do
    local known = call('GET', s.p .. 'blocks:' .. worker_id)
    for _, block in ipairs(known and unpacked(known) or {}) do
      answer[#answer + 1] = block[3]
    end
  end
  return answer
end)

-- worker, target
define_reading('get_block', function(s, args)
  local known = call('GET', s.p .. 'blocks:' .. args[4])
  for _, block in ipairs(known and unpacked(known) or {}) do
    if block[1] == args[5] then
      return block[3]
    end
  end
  return false
end)
