-- One key's counts: a state-based CRDT. As in a G-counter, each host has a component of its own, and their sum is the
-- count. Unlike in a G-counter, a refund may lower a component, so each report has a version: the time at which its
-- host read the count.
--
-- State: a hash. `sum` is the sum of all components. Each host has a field with its last report: when the host read its
-- count (by its own clock), its key's incarnation, the count, and when the report arrived here. `lost` exists if a host
-- had reported a count that this hash has lost. `most`, for a window, is the highest sum so far.
--
-- Beside the hashes there are hot lists: keys of which much is used, for hosts that haven't counted them. A list is a
-- sorted set in the slot of its keys. It has the name of each key, scored by its sum, so that the coldest keys come
-- first. One more member is the version, scored by its negative, so that it comes before them. Each change makes a
-- later version than all before, also if the list was lost in between: a version is at least the time.
local MOST_HOSTS = 1000
-- The keys of a list. A reply with two lists must stay below the limits of transport/replies.pyx.
local MOST_HOT = 64
local VERSION = 'version'

-- The hash's sum and one host's entry; nil if the value is foreign. `known` is the count that the host has reported for
-- this incarnation of the key; nil if it has reported none.
local function read_report(key, host, incarnation)
  local values = reply_of('HMGET', key, 'sum', host, 'lost', 'most')
  local sum = values and (values[1] and numbers(values[1], '^(%d+)$') or not values[1] and {0})
  if not sum then
    return nil
  end
  local report = {sum = sum[1], read = -1, is_new = not values[2], is_lost = values[3], most = 0}
  if values[4] then
    local most = numbers(values[4], '^(%d+)$')
    if not most then
      return nil
    end
    report.most = most[1]
  end
  -- The number of fields that belong to no host.
  report.others = (values[1] and 1 or 0) + (values[3] and 1 or 0) + (values[4] and 1 or 0)
  if values[2] then
    local of = string.match(values[2], '^%d+:(%x+):%d+:%d+$')
    local found = of and numbers(values[2], '^(%d+):%x+:(%d+):%d+$')
    if not found then
      return nil
    end
    report.read = found[1]
    if of == incarnation then
      report.known = found[2]
    end
  end
  return report
end

local function has_room(key, report)
  return not report.is_new or redis.call('HLEN', key) - report.others < MOST_HOSTS
end

local function write_report(key, report, host, read, incarnation, used, now, until_us)
  local entry = text(read) .. ':' .. incarnation .. ':' .. text(used) .. ':' .. text(now)
  redis.call('HSET', key, 'sum', text(report.sum), host, entry)
  redis.call('PEXPIREAT', key, expiry(until_us))
end

-- The name of a key, as it stands before the last colon.
local function name_of(key)
  return string.match(key, ':(%x+):[^:]*$')
end

-- The score of a key on its list; false if it has none; nil if the list is a foreign value.
local function read_score(list, key)
  return reply_of('ZSCORE', list, name_of(key))
end

-- Puts a key's sum on its list, in place of its `score` there. Below `share`, a key gets no place, but keeps the place
-- that it has. In a full list, a key takes the place of the coldest one if it is hotter. Returns whether the list has
-- changed.
local function publish(list, score, key, sum, share, now)
  if score and tonumber(score) == sum or not score and sum < share then
    return false
  end
  local first = redis.call('ZRANGE', list, 0, 1, 'WITHSCORES')
  if not score and redis.call('ZCARD', list) > MOST_HOT then
    if tonumber(first[4]) >= sum then
      return false
    end
    redis.call('ZREM', list, first[3])
  end
  local version = math.max(now, first[2] and 1 - first[2] or 0)
  redis.call('ZADD', list, text(-version), VERSION, text(sum), name_of(key))
  return true
end
