-- What hosts tell of a key: a hash with the sum of all, and for each host the last that it has told.
--
-- A host's entry is when it read what it told (by its own clock), its key's birth, what it told, and when that came here.
-- `lost` is there if a host had told what isn't known here any more. `most`, of a window, is the most that the sum has been.
local MOST_HOSTS = 1000

-- What the hash says of the sum and of a host; nil if it isn't one of ours. `known` is what it has told of this birth;
-- nil if it hasn't, or not of this one.
local function read_told(key, host, birth)
  local values = ask('HMGET', key, 'sum', host, 'lost', 'most')
  local sum = values and (values[1] and numbers(values[1], '^(%d+)$') or not values[1] and {0})
  if not sum then
    return nil
  end
  local told = {sum = sum[1], read = -1, is_new = not values[2], is_lost = values[3], most = 0}
  if values[4] then
    local most = numbers(values[4], '^(%d+)$')
    if not most then
      return nil
    end
    told.most = most[1]
  end
  -- How many fields are no host's.
  told.others = (values[1] and 1 or 0) + (values[3] and 1 or 0) + (values[4] and 1 or 0)
  if values[2] then
    local of = string.match(values[2], '^%d+:(%x+):%d+:%d+$')
    local found = of and numbers(values[2], '^(%d+):%x+:(%d+):%d+$')
    if not found then
      return nil
    end
    told.read = found[1]
    if of == birth then
      told.known = found[2]
    end
  end
  return told
end

local function has_room(key, told)
  return not told.is_new or redis.call('HLEN', key) - told.others < MOST_HOSTS
end

local function write_told(key, told, host, read, birth, used, now, until_us)
  local entry = text(read) .. ':' .. birth .. ':' .. text(used) .. ':' .. text(now)
  redis.call('HSET', key, 'sum', text(told.sum), host, entry)
  redis.call('PEXPIREAT', key, expiry(until_us))
end
