-- Part 11: documents. A collection is a hash of "<version> <body>", and a sorted set of its names.

-- Outside the prefix, because documents hold API keys and grants, which users of direct workers must not access.
local function cabinet_key(s)
  return s.p:sub(1, -2) .. '!cabinet'
end

local function collection_keys(s, collection)
  local key = cabinet_key(s) .. ':' .. collection
  return key, key .. ':names'
end

-- collection, name, version ("": any, 0: new), body → its new version; nil if it has another version
define('cabinet_put', function(s, args)
  local documents, names = collection_keys(s, args[4])
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

-- collection, name → 1; nil if it does not exist
define('cabinet_remove', function(s, args)
  local documents, names = collection_keys(s, args[4])
  if call('HDEL', documents, args[5]) == 0 then
    return false
  end
  call('ZREM', names, args[5])
  if call('ZCARD', names) == 0 then
    call('SREM', cabinet_key(s), args[4])
  end
  return 1
end)

-- collection, after, limit → name, "<version> <body>" …
define_reading('cabinet_list', function(s, args)
  local documents, names = collection_keys(s, args[4])
  local from = args[5] == '' and '-' or '(' .. args[5]
  local found = call('ZRANGEBYLEX', names, from, '+', 'LIMIT', 0, args[6])
  local answer = {}
  for place, name in ipairs(found) do
    answer[place * 2 - 1] = name
    answer[place * 2] = call('HGET', documents, name)
  end
  return answer
end)
