-- What hosts tell of a key: a hash with the sum of all, and for each host the last that it has told.
--
-- A host's entry is when it read what it told (by its own clock), its key's birth, what it told, and when that came here.
local MOST_HOSTS = 1000

-- What the hash says of the sum and of a host; nil if it isn't one of ours. `known` is what it has told of this birth;
-- nil if it hasn't, or not of this one.
local function read_told(key, sum_pattern, host, birth)
  local values = ask('HMGET', key, 'sum', host)
  local sum = values and (values[1] and numbers(values[1], sum_pattern) or not values[1] and {0})
  if not sum then
    return nil
  end
  local told = {sum = sum[1], read = -1, is_new = not values[2]}
  if values[2] then
    local read, of, used = string.match(values[2], '^(%d+):(%x+):(%d+):%d+$')
    if not read then
      return nil
    end
    told.read = tonumber(read)
    if of == birth then
      told.known = tonumber(used)
    end
  end
  return told
end

-- Who was heard of least recently makes room for a host that is new.
local function make_room(key)
  if redis.call('HLEN', key) > MOST_HOSTS then
    local fields, oldest, oldest_at = redis.call('HGETALL', key), nil, nil
    for i = 1, #fields, 2 do
      local at = tonumber(string.match(fields[i + 1], ':(%d+)$'))
      if fields[i] ~= 'sum' and at and (not oldest or at < oldest_at) then
        oldest, oldest_at = fields[i], at
      end
    end
    if oldest then
      redis.call('HDEL', key, oldest)
    end
  end
end

local function write_told(key, told, host, read, birth, used, now, until_us)
  if told.is_new then
    make_room(key)
  end
  local entry = text(read) .. ':' .. birth .. ':' .. text(used) .. ':' .. text(now)
  redis.call('HSET', key, 'sum', text(told.sum), host, entry)
  redis.call('PEXPIREAT', key, expiry(until_us))
end
