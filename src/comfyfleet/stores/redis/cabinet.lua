-- Small documents beside the queue. A drawer is a hash of "<version> <body>", and a set of its names for their order.

-- Keys and grants lie here: outside of what a worker's user may read or write.
local function cabinet_key(s)
  return s.p:sub(1, -2) .. '!cabinet'
end

local function drawer_keys(s, drawer)
  local key = cabinet_key(s) .. ':' .. drawer
  return key, key .. ':names'
end

-- drawer, name, version ("" for any, 0 for none yet), body → its version now; nil if it is at another one
define('cabinet_put', function(s, args)
  local documents, names = drawer_keys(s, args[4])
  local known = call('HGET', documents, args[5])
  local version = known and tonumber(known:match('^%d+')) or 0
  if args[6] ~= '' and tonumber(args[6]) ~= version then
    return false
  end
  call('HSET', documents, args[5], whole(version + 1) .. ' ' .. args[7])
  if not known then
    call('ZADD', names, 0, args[5])
    call('SADD', cabinet_key(s), args[4])
  end
  return version + 1
end)

-- drawer, name → 1; nil if there was none
define('cabinet_remove', function(s, args)
  local documents, names = drawer_keys(s, args[4])
  if call('HDEL', documents, args[5]) == 0 then
    return false
  end
  call('ZREM', names, args[5])
  if call('ZCARD', names) == 0 then
    call('SREM', cabinet_key(s), args[4])
  end
  return 1
end)

-- drawer, after, limit → name, "<version> <body>" …
define_reading('cabinet_list', function(s, args)
  local documents, names = drawer_keys(s, args[4])
  local from = args[5] == '' and '-' or '(' .. args[5]
  local found = call('ZRANGEBYLEX', names, from, '+', 'LIMIT', 0, args[6])
  local answer = {}
  for place, name in ipairs(found) do
    answer[place * 2 - 1] = name
    answer[place * 2] = call('HGET', documents, name)
  end
  return answer
end)
