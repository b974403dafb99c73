-- Functions that all algorithms share. Numbers are whole and below 2^53, so that a double holds them exactly.
--
-- An algorithm is a table of functions over a state, the decoded value of one key. A call reads it once and writes it
-- at most once. `a` are the algorithm's arguments.
--   arguments                 the number of arguments. The first is the amount that a request adds to the state. The
--                             second is the room: the most that may be used before the request. In a cancellation, the
--                             second is instead a number of the state that the charge has left
--   read(key, now, a)         the state; nil if the key holds a foreign value
--   allows(state, now, a)     whether the request is allowed
--   charge(state, now, a)     changes the state in memory, not in Redis
--   report(state, now, a, ok) whole numbers for the reply; ok: whether the request is allowed
--   write(key, state, now, a) writes the state to Redis
--   used(state, now, a)       for a window only: the permits used
--   left(state, now, a)       the permits that are left, if `a` are the arguments of a request for one permit
--   convert(state, now, a, keep, old, limit)      changes the state in memory from an old limit to this one. Returns
--                             whether it does: see convert.lua
--   add(state, now, a, permits)    changes the state in memory: the key has so many permits more
--   amount(permits, a)        the amount that a request for so many permits adds, if that is another number
--   give_back(key, state, now, a, is_cancelled)   takes a charge back, in Redis
local algorithms = {}

local function text(number)
  return string.format('%.0f', number)
end

-- a * b / c, rounded down, and the remainder. Exact even if the product is too large for a double. b and c must be
-- below 2^49, and the result below 2^53.
local function scaled(a, b, c)
  if a * b < 9007199254740992 then
    local whole = math.floor(a * b / c)
    return whole, a * b - whole * c
  end
  local digits, whole, rest = {}, 0, 0
  while a > 0 do
    digits[#digits + 1] = a % 8
    a = math.floor(a / 8)
  end
  for i = #digits, 1, -1 do
    rest = rest * 8 + digits[i] * b
    whole = whole * 8 + math.floor(rest / c)
    rest = rest % c
  end
  return whole, rest
end

-- The same, rounded up.
local function scaled_up(a, b, c)
  local whole, rest = scaled(a, b, c)
  return rest > 0 and whole + 1 or whole
end

-- How much of a new limit a key has used that has used so much of the old one. `keep` is what stays the same.
local function converted(used, keep, old_limit, new_limit)
  if keep == 'share' then
    return scaled_up(used, new_limit, old_limit)
  elseif keep == 'permits' then
    return new_limit - math.min(math.max(old_limit - used, 0), new_limit)
  end
  return used
end

-- The reply of a command; nil if the key holds another type of value.
local function reply_of(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then
    if string.find(answer.err, 'WRONGTYPE', 1, true) then
      return nil
    end
    error(answer.err, 0)
  end
  return answer
end

-- The numbers that a pattern captures from a text; nil if it doesn't match, or if no double holds a number exactly.
local function numbers(value, pattern)
  local found = {string.match(value, pattern)}
  if #found == 0 then
    return nil
  end
  for i, digits in ipairs(found) do
    found[i] = tonumber(digits)
    if found[i] >= 9007199254740992 then
      return nil
    end
  end
  return found
end

-- Whether a member's score can be a time that these scripts wrote.
local function is_time(score)
  return score % 1 == 0 and score >= 0 and score < 9007199254740992
end

-- The state of an algorithm that keeps a few numbers in one string.
local function read_text(key, pattern, fresh)
  local value = reply_of('GET', key)
  if value == false then
    return fresh
  end
  return value and numbers(value, pattern)
end

local function write_text(key, value, until_us, now)
  if until_us > now then
    redis.call('SET', key, value, 'PXAT', expiry(until_us))
  else
    redis.call('UNLINK', key)
  end
end
